//! Sudden death and a full disk: what was reported is there, and nothing half-made is taken for whole.
//!
//! The work is done by this test program, run again: its own tests `worker` and `full`, which do nothing otherwise.

use std::io::{BufRead, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;

/// Names the state directory to the program that is run again.
const WORK_IN: &str = "BULKHEAD_TEST_STORE";
const SEED: &str = "BULKHEAD_TEST_SEED";

fn again(test: &str, home: &Path, seed: u64, around: &[&str]) -> Command {
    let own = std::env::current_exe().unwrap();
    let mut command = match around.split_first() {
        Some((program, arguments)) => {
            let mut command = Command::new(program);
            command.args(arguments).arg(own);
            command
        }
        None => Command::new(own),
    };
    let name = format!("store::tests::sudden::{test}");
    command.args(["--exact", &name, "--nocapture"]).env(WORK_IN, home).env(SEED, seed.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

fn asked() -> Option<(PathBuf, Random)> {
    let home = PathBuf::from(std::env::var_os(WORK_IN)?);
    Some((home, Random(std::env::var(SEED).unwrap().parse().unwrap())))
}

/// Beside the state directory, where there is room.
fn log_of(home: &Path) -> PathBuf {
    home.with_file_name("log")
}

/// A place for a state directory and its log.
fn place() -> (tempfile::TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let home = place.path().join("home");
    std::fs::create_dir(&home).unwrap();
    (place, home)
}

/// Reports what is done, in a way that survives what comes.
fn report(home: &Path, what: &str, id: &str) {
    let log = OpenOptions::new().append(true).create(true).open(log_of(home));
    log.unwrap().write_all(format!("{what} {id}\n").as_bytes()).unwrap();
}

/// One thing that is done with snapshots; what came of it is reported when it was.
fn step(home: &Path, snapshots: &Snapshots, random: &mut Random) -> Result<(), StoreError> {
    let all = snapshots.list()?;
    let kind = if all.len() > 7 { 5 } else { random.below(8) };
    let picked = (!all.is_empty()).then(|| all[random.below(all.len())].clone());
    match (kind, picked) {
        (3, Some(one)) => {
            one.seal(&mut never)?;
            report(home, "sealed", one.id());
            let one = snapshots.find(one.id())?;
            let flat = snapshots.flatten(&one, "2026-12-02T00:00:00.000Z".into(), &mut never)?;
            report(home, "sealed", flat.id());
        }
        (4 | 6 | 7, Some(one)) => {
            // Out and in again: what was removed comes back.
            for part in one.below()?.iter().chain([&one]) {
                part.seal(&mut never)?;
            }
            let one = snapshots.find(one.id())?;
            let archive = home.join("archive");
            snapshots.export(&one, File::create(&archive).map_err(at(&archive))?, &mut never)?;
            report(home, "removing", one.id());
            match snapshots.remove(one.id()) {
                Ok(()) | Err(StoreError::InUse { .. }) => {}
                Err(error) => return Err(error),
            }
            let imported = snapshots.import(File::open(&archive).unwrap(), &mut never)?;
            report(home, "sealed", &imported.id);
        }
        (5, Some(one)) => {
            report(home, "removing", one.id());
            match snapshots.remove(one.id()) {
                Ok(()) => report(home, "removed", one.id()),
                Err(StoreError::InUse { .. }) => report(home, "published", one.id()),
                Err(error) => return Err(error),
            }
        }
        (kind, picked) => {
            let picked = picked.filter(|_| kind < 2);
            let mut below: Vec<String> = picked.as_ref().map_or(vec![], |one| one.manifest().layers.clone());
            below.extend(picked.map(|one| one.id().to_owned()));
            let below: Vec<&str> = below.iter().map(String::as_str).collect();
            let pending = snapshots.begin(None)?;
            let stamp = u8::try_from(1 + random.below(50)).unwrap();
            pending.create("memory")?.set_len(SIZE).map_err(at(Path::new("memory")))?;
            write_layer(&pending, &[(u64::from(stamp), stamp)])?;
            for file in ["state", "net.json", "spec.json", "streams.json"] {
                pending.write(file, &vec![stamp; 1 + random.below(20_000)])?;
            }
            let made = pending.publish(meta(&below))?;
            report(home, "published", made.id());
            made.seal(&mut never)?;
            report(home, "sealed", made.id());
        }
    }
    Ok(())
}

/// Holds what was reported against what is there.
fn check(home: &Path, snapshots: &Snapshots) {
    let (mut published, mut sealed) = (Vec::new(), Vec::new());
    for line in std::fs::read(log_of(home)).unwrap_or_default().lines() {
        let line = line.unwrap();
        let (what, id) = line.split_once(' ').unwrap();
        match what {
            "removing" | "removed" => published.retain(|other| other != id),
            _ => published.push(id.to_owned()),
        }
        match what {
            "sealed" => sealed.push(id.to_owned()),
            "removing" => sealed.retain(|other| other != id),
            _ => {}
        }
    }
    assert!(snapshots.broken().unwrap().is_empty(), "{:?}", snapshots.broken());
    for id in &published {
        snapshots.find(id).unwrap();
    }
    for id in &sealed {
        assert_eq!(snapshots.find(id).unwrap().status(), Status::Sealed);
    }
    for one in snapshots.list().unwrap() {
        one.verify(Depth::Always, &mut never).unwrap();
    }
    snapshots.sweep().unwrap();
    let left = names(&snapshots.directory).unwrap();
    assert!(left.iter().all(|name| is_id(name)), "left behind: {left:?}");
}

#[test]
fn worker() {
    let Some((home, mut random)) = asked() else { return };
    let snapshots = Snapshots::open(&home).unwrap();
    loop {
        step(&home, &snapshots, &mut random).unwrap();
    }
}

#[test]
fn what_was_reported_outlives_sudden_death() {
    let (_place, home) = place();
    let snapshots = Snapshots::open(&home).unwrap();
    let (mut random, tries) = tries(20, 200);
    for number in 0..tries {
        let mut worker = again("worker", &home, random.next(), &[]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(30 + random.next() % 250));
        worker.kill().unwrap();
        let ended = worker.wait_with_output().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&ended.status);
        assert_eq!(signal, Some(9), "try {number}: {}", String::from_utf8_lossy(&ended.stdout));
        check(&home, &snapshots);
    }
    let log = std::fs::read_to_string(log_of(&home)).unwrap();
    println!("{} reports in {tries} lives", log.lines().count());
    assert!(log.lines().count() > tries);
}

#[test]
fn full() {
    let Some((home, mut random)) = asked() else { return };
    rustix::mount::mount("small", &home, "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=4m,mode=700"))
        .unwrap();
    let snapshots = Snapshots::open(&home).unwrap();
    let (_, tries) = tries(60, 400);
    let mut full = 0;
    for _ in 0..tries {
        // Room for some of it, and for the report.
        let ballast = home.join("ballast");
        let free = rustix::fs::statvfs(&home).map(|found| found.f_bavail * found.f_frsize).unwrap();
        let leave = 8192 + random.next() % (96 << 10);
        let size = usize::try_from(free.saturating_sub(leave)).unwrap();
        std::fs::write(&ballast, vec![1; size]).unwrap();
        let done = step(&home, &snapshots, &mut random);
        std::fs::remove_file(&ballast).unwrap();
        match done {
            Ok(()) => {}
            Err(error) => {
                full += 1;
                let error = error.to_string();
                assert!(error.contains("No space left") || error.contains("StorageFull"), "{error}");
            }
        }
        check(&home, &snapshots);
    }
    assert!(full > tries / 10 && full < tries, "{full} of {tries} met a full disk");
    println!("{full} of {tries} met a full disk");
}

#[test]
fn a_full_disk_leaves_nothing_half_made() {
    let (_place, home) = place();
    let (mut random, _) = tries(0, 0);
    let around = ["unshare", "--mount", "--map-root-user", "--propagation", "private"];
    let ended = again("full", &home, random.next(), &around).stderr(Stdio::piped()).output().unwrap();
    let said = [ended.stdout, ended.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(ended.status.success(), "{said}");
    assert!(said.contains("met a full disk"), "{said}");
    println!("{said}");
}
