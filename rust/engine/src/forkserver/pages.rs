//! Puts the memory of a server's imports into huge pages. A fork copies one table entry for each page, and the end of
//! a process clears one for each. For the 400 MB of a process that has imported torch, that is most of the time of
//! both.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::kernel_file;
use crate::sys;

/// The size of huge pages on most kernels. A kernel with larger huge pages refuses smaller ranges.
const HUGE_BYTES: usize = 2 << 20;
/// Bytes that are gathered at once; the time is checked after each piece.
const PIECE_BYTES: usize = 32 << 20;
/// The longest time for gathering: the first orders wait for it.
const LONGEST: Duration = Duration::from_secs(2);
/// The file in which an administrator can switch huge pages off.
const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Makes each fork of this process cheaper, and the end of each forked process. Takes about as long as a copy of the
/// memory, but is limited. Memory that the kernel refuses to gather stays as it is.
pub(super) fn gather() {
    let switch = kernel_file::read(SWITCH).unwrap_or_default();
    if !String::from_utf8_lossy(&switch).contains("[never]") {
        let listed = std::fs::read("/proc/self/smaps").unwrap_or_default();
        let begin = Instant::now();
        for range in worth_gathering(&String::from_utf8_lossy(&listed)) {
            for start in range.clone().step_by(PIECE_BYTES) {
                if begin.elapsed() > LONGEST {
                    return;
                }
                let _ = sys::collapse(&(start..range.end.min(start + PIECE_BYTES)));
            }
        }
    }
}

/// For each private mapping that is mostly in memory: the range that whole huge pages cover. In other mappings,
/// gathering would occupy memory that is not used yet.
fn worth_gathering(smaps: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut mapping = None;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if !first.ends_with(':') {
            mapping = range(first).filter(|_| {
                let access = words.next();
                // The name follows offset, device and inode.
                let name = words.nth(3);
                access == Some("rw-p") && name.is_none_or(|name| name == "[heap]")
            });
        } else if first == "Rss:"
            && let Some(range) = mapping.take()
        {
            let resident: usize = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
            let whole = range.start.next_multiple_of(HUGE_BYTES)..range.end / HUGE_BYTES * HUGE_BYTES;
            if !whole.is_empty() && resident * 1024 > range.len() / 2 {
                found.push(whole);
            }
        }
    }
    found
}

/// Two addresses with a dash between them.
fn range(word: &str) -> Option<Range<usize>> {
    let (start, end) = word.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(range: &str, rest: &str, resident: usize) -> String {
        format!("{range} {rest}\nSize: 1 kB\nRss: {resident} kB\nPss: 9999999 kB\nVmFlags: rd wr mr\n")
    }

    #[test]
    fn whole_pages_of_what_is_private_writable_and_mostly_there_are_gathered() {
        let wide = "7f0000100000-7f0000900000";
        let (anonymous, heap) = ("rw-p 00000000 00:00 0 ", "rw-p 00000000 00:00 0  [heap]");
        for (range, rest, resident, expected) in [
            (wide, anonymous, 8192, Some(0x7f00_0020_0000..0x7f00_0080_0000)),
            (wide, heap, 4097, Some(0x7f00_0020_0000..0x7f00_0080_0000)),
            (wide, anonymous, 4096, None),
            ("7f0000100000-7f0000300000", anonymous, 2048, None),
            (
                "7f0000200000-7f0000400000",
                anonymous,
                2048,
                Some(0x7f00_0020_0000..0x7f00_0040_0000),
            ),
            (wide, "r--p 00000000 00:00 0 ", 8192, None),
            (wide, "rw-s 00000000 00:00 0 ", 8192, None),
            (wide, "rw-p 00001000 08:01 77  /usr/lib/a b.so", 8192, None),
            (wide, "rw-p 00000000 00:00 0  [stack]", 8192, None),
        ] {
            let text = mapping("1000-2000", anonymous, 4) + &mapping(range, rest, resident);
            assert_eq!(worth_gathering(&text), Vec::from_iter(expected), "{range} {rest}");
        }
        assert_eq!(worth_gathering("no mapping\nRss: x\n-\n").len(), 0);
    }
}
