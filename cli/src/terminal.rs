//! The user's terminal: raw while a command owns it, and as it was on every way out.

use std::io;
use std::sync::{Mutex, PoisonError};

use rustix::stdio::{stdin, stdout};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use crate::frame::Size;

/// What was set before, while the terminal is raw.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Undoes what a full-screen program that was killed leaves behind: alternate screen, mouse reports, focus
/// reports, bracketed paste, Kitty's keyboard protocol, application keys, colours, a hidden cursor.
const RESET: &[u8] = b"\x1b[?1047l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1004l\x1b[?2004l\x1b[<u\x1b[?1l\
                       \x1b>\x1b[0m\x1b[?25h";

/// Whether standard input is a terminal.
pub(crate) fn is_here() -> bool {
    isatty(stdin())
}

/// The terminal's size; a plain one's if it does not say.
pub(crate) fn size() -> Size {
    match tcgetwinsize(stdin()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => Size { rows: size.ws_row, columns: size.ws_col },
        _ => Size { rows: 24, columns: 80 },
    }
}

/// The terminal's type for the guest. What is no plain word is not passed on.
pub(crate) fn kind() -> String {
    let word = |kind: &String| {
        !kind.is_empty() && kind.len() <= 64 && kind.chars().all(|c| c.is_ascii_alphanumeric() || "-_.+".contains(c))
    };
    std::env::var("TERM").ok().filter(word).unwrap_or_else(|| "xterm".to_owned())
}

/// Makes the terminal raw, and sees to it that a panic restores it.
pub(crate) fn make_raw() -> io::Result<()> {
    let before = tcgetattr(stdin())?;
    let mut raw = before.clone();
    raw.make_raw();
    *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
    let show = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        restore();
        show(info);
    }));
    tcsetattr(stdin(), OptionalActions::Now, &raw)?;
    Ok(())
}

/// Restores the terminal, if it is raw.
pub(crate) fn restore() {
    if let Some(before) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        if isatty(stdout()) {
            // Best effort, on the way out.
            let _ = rustix::io::write(stdout(), RESET);
        }
        // At once: a terminal that was stopped with ^S would never drain.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &before);
    }
}

/// Ends the process, with the terminal restored.
pub(crate) fn exit(code: u8) -> ! {
    restore();
    std::process::exit(i32::from(code))
}
