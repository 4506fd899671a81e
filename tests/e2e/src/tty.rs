//! Commands on a terminal.

use std::process::Stdio;

use crate::Test;
use crate::cli::Bulkhead;
use crate::command::until;
use crate::processes;
use crate::pty::Session;

pub(crate) const TESTS: &[Test] = &[
    ("tty::a_terminal_needs_one_here", a_terminal_needs_one_here),
    ("tty::a_terminal_works_and_is_restored", a_terminal_works_and_is_restored),
];

fn a_terminal_needs_one_here() {
    let bulkhead = Bulkhead::new();
    let refused = bulkhead.output(&["run", "-t", "busybox", "sh"]).refused(125);
    assert_eq!(
        refused,
        "bulkhead: cannot start run: the input device is not a TTY; leave -t out, or start it in a terminal\n"
    );
    let refused = bulkhead.output(&["exec", "-it", "box", "sh"]).refused(125);
    assert_eq!(refused, "bulkhead: the input device is not a TTY; leave -t out, or start it in a terminal\n");
    assert!(bulkhead.runs().is_empty());
}

fn a_terminal_works_and_is_restored() {
    let bulkhead = Bulkhead::new();
    let script = "trap 'echo now $(stty size)' WINCH; tty; echo $TERM at $(stty size); \
                  while ! read -r line; do :; done; echo read $line; \
                  printf '\\033[?1049h\\033[?1000h'; echo waiting; while :; do sleep 1; done";
    let mut command = bulkhead.command(&["run", "-it", "--name", "box", "busybox", "sh", "-c", script]);
    let mut session = Session::start(command.env("TERM", "screen-256color"));
    session.until("/dev/pts/");
    session.until("screen-256color at 40 100\r\n");
    assert!(session.is_raw());

    session.resize(50, 132);
    session.until("now 50 132\r\n");
    session.press("some words\r");
    session.until("read some words\r\n");
    session.until("waiting");

    // Another command on another terminal: a key of the user's interrupts it, and it alone.
    let mut other = Session::start(&mut bulkhead.command(&["exec", "-it", "box", "sh", "-c", "tty; sleep 100000"]));
    other.until("/dev/pts/");
    assert!(other.is_raw());
    until("its sleep", || bulkhead.shell("box", "ps").stdout.contains("sleep 100000"));
    other.press("\x03");
    assert_eq!(other.finish(), 130);
    assert!(!other.is_raw(), "restored");
    // A shell that somebody types at: it echoes, runs what it is told, and the end-of-input key ends it.
    let mut shell = Session::start(&mut bulkhead.command(&["exec", "-it", "box", "sh"]));
    shell.until("# ");
    shell.press("echo $((40 + 2)) $(stty -a | grep -o ' echo ')\r");
    shell.until("42 echo\r\n");
    shell.press("sleep 4321\r");
    until("its sleep", || bulkhead.shell("box", "ps").stdout.contains("sleep 4321"));
    shell.press("\x03");
    shell.press("echo and $((6 * 7))\r");
    shell.until("and 42\r\n");
    assert!(shell.is_raw());
    shell.press("\x04");
    assert_eq!(shell.finish(), 0);
    assert!(!shell.is_raw(), "restored");
    // Its input may be a terminal without the command's being one: then keys stay what they are here.
    let mut plain = bulkhead.command(&["exec", "box", "sh", "-c", "tty; echo TERM=$TERM"]);
    let output = crate::command::output(plain.stdin(Stdio::null()), b"");
    assert_eq!((output.code, output.stdout.as_str()), (0, "not a tty\nTERM=\n"));

    // The machine dies while a full-screen program owns the terminal.
    processes::vmm(&bulkhead).kill();
    assert_eq!(session.finish(), 125);
    assert!(!session.is_raw(), "restored");
    let shown = session.shown();
    assert!(shown.contains("\x1b[?1047l") && shown.contains("\x1b[?1000l"), "{shown:?}");
    let last = shown.rsplit("bulkhead: ").next().unwrap();
    assert!(last.contains("its VMM ended unexpectedly (signal: 9 (SIGKILL))"), "{shown:?}");
    processes::none_left(&bulkhead);
}
