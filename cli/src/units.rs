//! Sizes and durations, as people write them and as we print them.

use std::time::Duration;

/// Why a size or a duration was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnitError {
    /// No number where one belongs.
    #[error("{0:?} is no size; write a number with a unit, such as 512M, 4G or 4GB")]
    Size(String),
    /// A unit that sizes do not have.
    #[error("{text:?} has the unit {unit:?}; sizes have K, M, G or T (with or without B or iB), and all are binary")]
    SizeUnit {
        /// What was written.
        text: String,
        /// Its unit.
        unit: String,
    },
    /// No number where one belongs.
    #[error("{0:?} is no duration; write a number with a unit, such as 30s, 15m, 8h or 1h30m")]
    Duration(String),
    /// More than fits.
    #[error("{0:?} is too large")]
    TooLarge(String),
    /// Nothing at all.
    #[error("{0:?} is zero")]
    Zero(String),
}

/// Reads a size in bytes. `G`, `GB` and `GiB` are the same, in either case; a bare number is bytes.
pub(crate) fn parse_size(text: &str) -> Result<u64, UnitError> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = unit.trim_start();
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ if number.is_empty() => return Err(UnitError::Size(text.to_owned())),
        _ => return Err(UnitError::SizeUnit { text: text.to_owned(), unit: unit.to_owned() }),
    };
    let bytes = scale(number, 1_u64 << shift).ok_or_else(|| UnitError::Size(text.to_owned()))?;
    let bytes = u64::try_from(bytes).ok().filter(|b| *b <= 1 << 60);
    match bytes.ok_or_else(|| UnitError::TooLarge(text.to_owned()))? {
        0 => Err(UnitError::Zero(text.to_owned())),
        bytes => Ok(bytes),
    }
}

/// `number` (`4` or `1.5`) times `unit`, rounded down; nothing if it is no number.
fn scale(number: &str, unit: u64) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.len() > 6 || whole.len() > 20 {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    let fraction: u128 = format!("{fraction:0<6}").parse().ok()?;
    whole.checked_mul(u128::from(unit))?.checked_add(fraction.checked_mul(u128::from(unit))? / 1_000_000)
}

/// Prints a size with one decimal and its binary unit: `4.0 GiB`.
pub(crate) fn show_size(bytes: u64) -> String {
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        let one = 1_u64 << shift;
        if bytes >= one {
            let tenths = u128::from(bytes) * 10 / u128::from(one);
            return format!("{}.{} {unit}", tenths / 10, tenths % 10);
        }
    }
    format!("{bytes} B")
}

/// Reads a duration: `30s`, `15m`, `8h`, `2d`, `500ms`, and such in a row, as `1h30m`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let bad = || UnitError::Duration(text.to_owned());
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let millis: u64 = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        if number.is_empty() {
            return Err(bad());
        }
        let part = number.parse::<u64>().ok().and_then(|n| n.checked_mul(millis));
        let part = part.ok_or_else(|| UnitError::TooLarge(text.to_owned()))?;
        // A hundred years keep every sum with a clock's reading in range.
        total = total
            .checked_add(Duration::from_millis(part))
            .filter(|t| t.as_secs() < 100 * 365 * 86_400)
            .ok_or_else(|| UnitError::TooLarge(text.to_owned()))?;
        rest = tail;
    }
    match (text.is_empty(), total.is_zero()) {
        (true, _) => Err(bad()),
        (_, true) => Err(UnitError::Zero(text.to_owned())),
        _ => Ok(total),
    }
}

/// Prints a duration as [`parse_duration`] reads it: `1h30m`.
pub(crate) fn show_duration(duration: Duration) -> String {
    let mut millis = duration.as_millis();
    let mut out = String::new();
    for (unit, size) in [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)] {
        if millis >= size {
            out.push_str(&format!("{}{unit}", millis / size));
            millis %= size;
        }
    }
    if out.is_empty() { "0s".to_owned() } else { out }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_unit_is_binary_however_it_is_written() {
        for text in ["4G", "4g", "4GB", "4gb", "4GiB", "4 GiB", "4096M", "4096MB", "4.0G", "4194304K", "4294967296"] {
            assert_eq!(parse_size(text), Ok(4 << 30), "{text}");
        }
        assert_eq!(parse_size("1.5G"), Ok(3 << 29));
        assert_eq!(parse_size("0.5M"), Ok(512 << 10));
        assert_eq!(parse_size("2T"), Ok(2 << 40));
    }

    #[test]
    fn what_is_no_size_is_refused_by_its_fault() {
        for text in ["", "G", "lots", "-1G", "4..G", "4.G", ".5G", "0x10"] {
            let error = parse_size(text).unwrap_err();
            assert!(matches!(error, UnitError::Size(_) | UnitError::SizeUnit { .. }), "{text}: {error}");
        }
        assert!(matches!(parse_size("4P"), Err(UnitError::SizeUnit { .. })));
        assert!(matches!(parse_size("4Gb/s"), Err(UnitError::SizeUnit { .. })));
        assert!(matches!(parse_size("99999999999999T"), Err(UnitError::TooLarge(_))));
        assert!(matches!(parse_size("0"), Err(UnitError::Zero(_))));
        assert!(matches!(parse_size("0.0G"), Err(UnitError::Zero(_))));
    }

    #[test]
    fn sizes_print_with_one_decimal() {
        assert_eq!(show_size(4 << 30), "4.0 GiB");
        assert_eq!(show_size((1 << 30) + (200 << 20)), "1.1 GiB");
        assert_eq!(show_size(64 << 20), "64.0 MiB");
        assert_eq!(show_size(12), "12 B");
    }

    #[test]
    fn durations_add_up() {
        assert_eq!(parse_duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_duration("15m"), Ok(Duration::from_secs(900)));
        assert_eq!(parse_duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in ["", "s", "15", "1.5h", "-3s", "3 s", "5x", "m5"] {
            assert!(matches!(parse_duration(text), Err(UnitError::Duration(_))), "{text}");
        }
        assert!(matches!(parse_duration("0s"), Err(UnitError::Zero(_))));
        assert!(matches!(parse_duration("99999999999999999d"), Err(UnitError::TooLarge(_))));
        assert!(matches!(parse_duration("900000d"), Err(UnitError::TooLarge(_))));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,24}") {
            let _ = parse_size(&text);
            let _ = parse_duration(&text);
        }

        #[test]
        fn a_printed_duration_reads_back(millis in 1_u64..10_000_000_000) {
            let duration = Duration::from_millis(millis);
            prop_assert_eq!(parse_duration(&show_duration(duration)), Ok(duration));
        }
    }
}
