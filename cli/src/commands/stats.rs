//! `bulkhead stats`.

use super::{dial, print, report};
use crate::client::{ClientError, unexpected};
use crate::frame::{Frame, Request};

/// `bulkhead stats`
pub(crate) fn stats(run: &str) -> Result<u8, String> {
    let (listed, mut connection) = dial(run)?;
    let failed = |error: &dyn std::fmt::Display| format!("run {}: {error}", listed.spec.id);
    Frame::Request(Request::Stats).write(&mut connection).map_err(|error| failed(&error))?;
    match Frame::read(&mut connection).map_err(|error| failed(&error))? {
        Some(Frame::Stats(stats)) => {
            let mut text = serde_json::to_string(&stats).map_err(|error| failed(&error))?;
            text.push('\n');
            print(&text)?;
            Ok(0)
        }
        Some(Frame::Exit(exit)) => Ok(report(&exit)),
        Some(other) => Err(failed(&unexpected(&other))),
        None => Err(failed(&ClientError::Lost)),
    }
}
