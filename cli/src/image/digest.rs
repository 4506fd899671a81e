//! SHA-256, which image formats name things by.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// A SHA-256 as 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Digest(String);

impl Digest {
    /// Takes `sha256:` and 64 lower-case digits. Nothing else can be named: a digest becomes part of a path.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        text.strip_prefix("sha256:").and_then(Self::from_hex)
    }

    /// Takes the digits alone.
    pub(crate) fn from_hex(digits: &str) -> Option<Self> {
        let fine = digits.len() == 64 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        fine.then(|| Self(digits.to_owned()))
    }

    /// Of these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The digits.
    pub(crate) fn hex(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Bytes on their way to a digest.
#[derive(Clone, Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    /// The next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// There are no more.
    pub(crate) fn finish(self) -> Digest {
        Digest(self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_what_they_should_be() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").hex(), empty);
        assert_eq!(Digest::parse(&format!("sha256:{empty}")), Digest::from_hex(empty));
        for wrong in
            ["", "sha256:", "sha512:00", "sha256:../../etc/passwd", &format!("sha256:{}", empty.to_uppercase())]
        {
            assert_eq!(Digest::parse(wrong), None, "{wrong}");
        }
    }
}
