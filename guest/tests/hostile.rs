//! A machine whose agent is the enemy: the supervisor's end must end with an error, never panic, hang for want of a
//! bound, or take what it says at its word.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, missing_debug_implementations)]

use guest::{
    frame::{Body, Decoder, MAX_FRAME, MAX_REQUEST, parse, put_ack, put_data, put_end, put_json},
    host::{Agent, AgentError, Dial, Exec, Welcome},
    message::{
        About, Action, ExecSpec, ExitRecord, FromAgent, MAX_TEXT, Opening, Refusal, RefusalKind, Request, StartFailure,
    },
};
use proptest::prelude::*;
use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// An agent that keeps the rules until it starts an exec, and says this afterwards; on the one stream that is opened
/// it says that. Then the machine is gone.
#[derive(Clone, Default)]
struct Script {
    /// In place of the hello.
    first: Option<Vec<u8>>,
    after_exec: Vec<u8>,
    stream: Vec<u8>,
}

struct Line {
    script: Script,
    left: AtomicUsize,
}

impl Dial for Line {
    fn dial(&self, _port: u32) -> io::Result<UnixStream> {
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let (ours, theirs) = UnixStream::pair()?;
        let script = self.script.clone();
        thread::spawn(move || play(theirs, &script));
        Ok(ours)
    }
}

/// Until the other end hangs up, or nothing has come for a while.
fn play(mut socket: UnixStream, script: &Script) {
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut decoder = Decoder::new(MAX_REQUEST);
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = socket.read(&mut buffer) {
        decoder.push(&buffer[..count]);
        while let Ok(Some(body)) = decoder.next_frame() {
            let Body::Json(body) = body else { continue };
            let answer = match (parse::<Opening>(body), parse::<Request>(body)) {
                (Ok(Opening::Control { .. }), _) => script.first.clone().unwrap_or_else(hello),
                (Ok(Opening::Stream { .. }), _) => script.stream.clone(),
                (_, Ok(Request { id, action: Action::Exec(_) })) => [done(id), script.after_exec.clone()].concat(),
                (_, Ok(Request { id, .. })) => done(id),
                _ => panic!("the host sent what is neither"),
            };
            if socket.write_all(&answer).is_err() {
                return;
            }
        }
    }
}

fn json(message: &FromAgent) -> Vec<u8> {
    let mut out = Vec::new();
    put_json(&mut out, message, MAX_REQUEST).unwrap();
    out
}

fn hello() -> Vec<u8> {
    let about =
        About { version: 1, agent: "0\x1b[31m".into(), capabilities: vec![], kernel: "6".into(), memory: u64::MAX };
    json(&FromAgent::Hello(about))
}

fn done(id: u64) -> Vec<u8> {
    json(&FromAgent::Reply { id, refused: None })
}

fn connect(script: Script, connections: usize) -> Result<Agent, AgentError> {
    let dial = Arc::new(Line { script, left: AtomicUsize::new(connections) });
    let welcome = Welcome { epoch: 1, renew_identity: false, entropy: vec![1; 32], hostname: "box".into() };
    Agent::connect(dial, &welcome, Instant::now() + Duration::from_secs(2))
}

fn greeting(first: Vec<u8>) -> Result<Agent, AgentError> {
    connect(Script { first: Some(first), ..Script::default() }, 1)
}

fn start(script: Script) -> Exec {
    let agent = connect(script, 2).unwrap();
    agent.exec(ExecSpec { stdin: true, ..ExecSpec::command("a", vec!["x".into()]) }).unwrap()
}

/// What the pump of an output stream says to this.
fn stream(bytes: Vec<u8>) -> Result<u64, AgentError> {
    start(Script { stream: bytes, ..Script::default() }).copy_stdout(&mut io::sink())
}

fn attached(offset: u64) -> Vec<u8> {
    json(&FromAgent::Attached { offset })
}

#[test]
fn a_machine_that_only_answers_rubbish_is_refused() {
    assert!(matches!(greeting(vec![0xff; 100]), Err(AgentError::Protocol(_))));
    assert!(matches!(greeting(attached(0)), Err(AgentError::Protocol(_))));
    assert!(matches!(connect(Script::default(), 0), Err(AgentError::Gone)));
    let version = Refusal { kind: RefusalKind::Version, message: "no\x1b[2J".into() };
    let Err(error) = greeting(json(&FromAgent::Refused(version))) else { panic!("accepted") };
    assert!(!error.to_string().contains('\x1b'), "{error}");
    let agent = connect(Script::default(), 1).unwrap();
    assert!(!agent.about().agent.contains('\x1b'));
}

#[test]
fn an_agent_that_never_answers_is_late() {
    let before = Instant::now();
    assert!(matches!(connect(Script { first: Some(vec![]), ..Script::default() }, 100), Err(AgentError::Late(_))));
    assert!(before.elapsed() < Duration::from_secs(4));
}

#[test]
fn offsets_are_not_believed() {
    let data = |offset, bytes: &[u8]| {
        let mut out = Vec::new();
        put_data(&mut out, offset, bytes);
        out
    };
    let end = |total| {
        let mut out = Vec::new();
        put_end(&mut out, total);
        out
    };
    let mut ack = Vec::new();
    put_ack(&mut ack, 7);
    let good = [attached(0), data(0, b"abc"), data(3, b"d"), end(4)].concat();
    assert_eq!(stream(good).unwrap(), 4);
    for bad in [
        [attached(1)].concat(),
        [attached(0), data(1, b"x")].concat(),
        [attached(0), data(u64::MAX, b"x")].concat(),
        [attached(0), data(0, b"x"), data(0, b"x")].concat(),
        [attached(0), data(0, b"x"), end(2)].concat(),
        [attached(0), end(u64::MAX)].concat(),
        [attached(0), ack].concat(),
        [attached(0), attached(0)].concat(),
        [attached(0), vec![0xff, 0xff, 0xff, 0xff]].concat(),
        [attached(0), (u32::try_from(MAX_FRAME).unwrap() + 1).to_le_bytes().to_vec()].concat(),
        [attached(0), vec![0, 0, 0, 0]].concat(),
        json(&FromAgent::Closed { offset: 0 }),
    ] {
        assert!(matches!(stream(bad.clone()), Err(AgentError::Protocol(_))), "{bad:?}");
    }
}

#[test]
fn records_are_only_taken_for_what_was_started_and_only_once() {
    let exited = |exec: &str, code| json(&FromAgent::Exited { exec: exec.into(), record: ExitRecord::Exited { code } });
    let after_exec = [exited("b", 1), done(77), exited("a", 2), exited("a", 3)].concat();
    let exec = start(Script { after_exec, ..Script::default() });
    assert_eq!(exec.wait().unwrap(), ExitRecord::Exited { code: 2 });

    let message = "\x1b]0;owned\x07".repeat(500);
    let record = ExitRecord::FailedToStart { kind: StartFailure::Other, message };
    let after_exec = json(&FromAgent::Exited { exec: "a".into(), record });
    let exec = start(Script { after_exec, ..Script::default() });
    let ExitRecord::FailedToStart { message, .. } = exec.wait().unwrap() else { panic!("another record") };
    assert!(message.chars().count() <= MAX_TEXT && !message.chars().any(char::is_control));

    // No record at all, and one that does not exist.
    assert!(matches!(start(Script::default()).wait(), Err(AgentError::Gone)));
    let mut after_exec = Vec::new();
    put_json(&mut after_exec, &serde_json::json!({"exited": {"exec": "a", "record": "fine"}}), MAX_FRAME).unwrap();
    assert!(matches!(start(Script { after_exec, ..Script::default() }).wait(), Err(AgentError::Protocol(_))));
}

#[test]
fn input_acknowledgements_are_not_believed() {
    let ack = |offset| {
        let mut out = attached(0);
        put_ack(&mut out, offset);
        out
    };
    for (bad, source) in [(ack(u64::MAX), &b"abc"[..]), (attached(5), b""), (attached(u64::MAX), b"abc")] {
        let exec = start(Script { stream: bad, ..Script::default() });
        let mut source = source.chain(io::empty());
        let outcome = exec.copy_stdin(&mut source);
        assert!(matches!(outcome, Err(AgentError::Protocol(_))), "{outcome:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_bytes_end_in_an_error(bytes in prop::collection::vec(any::<u8>(), 1..200), whole in any::<bool>()) {
        let mut frame = u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
        frame.extend_from_slice(&bytes);
        let bytes = if whole { frame } else { bytes };
        let exec = start(Script { stream: [attached(0), bytes.clone()].concat(), ..Script::default() });
        let outcome = exec.copy_stdout(&mut io::sink());
        prop_assert!(outcome.is_err());
        let exec = start(Script { after_exec: bytes, ..Script::default() });
        prop_assert!(exec.wait().is_err());
    }
}
