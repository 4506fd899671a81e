//! Wall-clock times as JSON has them (RFC 3339, UTC, milliseconds) and ages as people read them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Now, as JSON has it.
pub(crate) fn now() -> String {
    show(SystemTime::now())
}

/// A time as JSON has it: `2026-11-30T15:35:09.123Z`.
pub(crate) fn show(time: SystemTime) -> String {
    // Before 1970 no host of ours has a clock: it is not set.
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since.subsec_millis())
}

/// Reads a time that [`show`] wrote.
pub(crate) fn read(text: &str) -> Option<SystemTime> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let marks = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':'), (19, b'.'), (23, b'Z')];
    if text.len() != 24 || !marks.iter().all(|(at, mark)| text.as_bytes().get(*at) == Some(mark)) {
        return None;
    }
    let days = days(number(0, 4)?, number(5, 7)?, number(8, 10)?)?;
    let seconds = days * 86_400 + number(11, 13)? * 3600 + number(14, 16)? * 60 + number(17, 19)?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds) + Duration::from_millis(number(20, 23)?))
}

/// How long ago that was, with one unit: `12s`, `5m`, `3h`, `2d`.
pub(crate) fn age(since: SystemTime, now: SystemTime) -> String {
    let seconds = now.duration_since(since).unwrap_or_default().as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Year, month and day of a day since 1970. Years are counted from March, so that the leap day is a year's last.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let march_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let year = year - u64::from(month <= 2);
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    Some(era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(millis: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(millis)
    }

    #[test]
    fn known_times() {
        assert_eq!(show(at(0)), "1970-01-01T00:00:00.000Z");
        assert_eq!(show(at(951_782_400_000)), "2000-02-29T00:00:00.000Z");
        assert_eq!(show(at(1_796_052_909_007)), "2026-11-30T15:35:09.007Z");
        for bad in
            ["", "2026-11-30", "2026-11-30T15:35:09.007+", "2026-13-30T15:35:09.007Z", "2026-11-30T15:35:09,007Z"]
        {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn ages_have_one_unit() {
        let ages = [0, 59, 60, 3599, 3600, 86_399, 86_400 * 3].map(|s| age(at(0), at(s * 1000)));
        assert_eq!(ages, ["0s", "59s", "1m", "59m", "1h", "23h", "3d"]);
        assert_eq!(age(at(5000), at(0)), "0s", "a clock that was set back");
    }

    proptest! {
        #[test]
        fn what_is_shown_reads_back(millis in 0_u64..250_000_000_000_000) {
            prop_assert_eq!(read(&show(at(millis))), Some(at(millis)));
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,30}") {
            let _ = read(&text);
        }
    }
}
