//! The time in prefixes: the local time at which bytes were read.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use memchr::memmem;

use crate::sys;

/// Stands for the time in a prefix. Its letters are as many as those of a time, so that widths are right.
const PATTERN: &[u8; LENGTH] = b"HH:MM:SS.mmm";
const LENGTH: usize = 12;

/// A time as text, such as `09:05:00.042`.
pub(super) type Time = [u8; LENGTH];

/// Where the pattern is in a prefix.
pub(super) fn places(prefix: &[u8]) -> Vec<usize> {
    memmem::find_iter(prefix, PATTERN).collect()
}

/// Puts a time at each of these places of a prefix.
pub(super) fn put(time: Time, prefix: &mut [u8], places: &[usize]) {
    for &place in places {
        prefix[place..place + LENGTH].copy_from_slice(&time);
    }
}

/// Tells the time. The time zone is asked once a second at most.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// The second since 1970 that `text` tells.
    second: Option<u64>,
    text: Time,
}

impl Clock {
    pub(super) fn now(&mut self) -> Time {
        // A clock before 1970 shows the begin of that year.
        self.at(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
    }

    fn at(&mut self, since_1970: Duration) -> Time {
        let second = since_1970.as_secs();
        if self.second != Some(second) {
            let [hour, minute, of_minute] = sys::local_time(second);
            let text = format!("{hour:02}:{minute:02}:{of_minute:02}.");
            self.text[..text.len()].copy_from_slice(text.as_bytes());
            self.second = Some(second);
        }
        let [.., a, b, c] = &mut self.text;
        let milliseconds = since_1970.subsec_millis();
        for (digit, unit) in [(a, 100), (b, 10), (c, 1)] {
            *digit = b'0' + (milliseconds / unit % 10) as u8;
        }
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_millisecond_has_its_text() {
        let mut clock = Clock::default();
        let mut text =
            |milliseconds| String::from_utf8(clock.at(Duration::from_millis(milliseconds)).to_vec()).unwrap();
        let [hour, minute, _] = sys::local_time(42);
        assert_eq!(text(42_007), format!("{hour:02}:{minute:02}:42.007"));
        assert_eq!(text(42_999), format!("{hour:02}:{minute:02}:42.999"));
        assert_eq!(text(43_010), format!("{hour:02}:{minute:02}:43.010"));
    }

    #[test]
    fn a_prefix_has_the_time_wherever_it_is_asked_for() {
        let mut prefix = b"[HH:MM:SS.mmm 3] HH:MM HH:MM:SS.mmm".to_vec();
        let places = places(&prefix);
        for time in [*b"01:02:03.004", *b"23:59:59.999"] {
            put(time, &mut prefix, &places);
            let time = str::from_utf8(&time).unwrap();
            assert_eq!(prefix, format!("[{time} 3] HH:MM {time}").into_bytes());
        }
    }
}
