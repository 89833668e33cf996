//! A prefix that names one of several workers by a number, such as `[rank 3] `.

/// The parts of a prefix, without colours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tag {
    head: Vec<u8>,
    pub(super) number: u32,
    tail: Vec<u8>,
    /// The mark that torch puts before the lines of this rank's tracebacks; empty if the prefix is not `[rank N] `.
    mark: Vec<u8>,
}

impl Tag {
    /// Reads a prefix; `None` if it has no number. If it has several, the last one counts.
    pub(super) fn read(prefix: &[u8]) -> Option<Self> {
        let text = without_colours(prefix);
        let end = text.iter().rposition(u8::is_ascii_digit)? + 1;
        let is_other = |byte: &u8| !byte.is_ascii_digit();
        let begin = text[..end].iter().rposition(is_other).map_or(0, |at| at + 1);
        let number = std::str::from_utf8(&text[begin..end]).ok()?.parse().ok()?;
        let mut head = text[..begin].to_vec();
        if head.ends_with(b" ") {
            // Padding aligns the numbers of different workers. Keep only one blank.
            head.truncate(head.trim_ascii_end().len() + 1);
        }
        let tail = text[end..].to_vec();
        let is_ours = head == b"[rank " && tail == b"] ";
        let mark = is_ours.then(|| format!("[rank{number}]:").into_bytes());
        Some(Self {
            head,
            number,
            tail,
            mark: mark.unwrap_or_default(),
        })
    }

    /// The line without torch's mark, which repeats the prefix.
    pub(super) fn without_mark<'text>(&self, text: &'text [u8]) -> &'text [u8] {
        if self.mark.is_empty() {
            return text;
        }
        match text.strip_prefix(&self.mark[..]) {
            Some(rest) => rest.strip_prefix(b" ").unwrap_or(rest),
            None => text,
        }
    }

    /// Whether the two prefixes differ only in their numbers.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.head == other.head && self.tail == other.tail
    }

    /// A prefix of this form for several workers: `[rank 0-3,5] `.
    pub(super) fn of_many(&self, numbers: &mut [u32]) -> Vec<u8> {
        numbers.sort_unstable();
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &number in &*numbers {
            match runs.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
                _ => runs.push((number, number)),
            }
        }
        let name = |&(first, last): &(u32, u32)| {
            if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            }
        };
        let names = runs.iter().map(name).collect::<Vec<_>>().join(",");
        [&self.head[..], names.as_bytes(), &self.tail[..]].concat()
    }
}

fn without_colours(text: &[u8]) -> Vec<u8> {
    let mut rest = text;
    let mut kept = Vec::new();
    while let Some(at) = memchr::memmem::find(rest, b"\x1b[") {
        kept.extend_from_slice(&rest[..at]);
        let end = rest[at..].iter().position(|byte| *byte == b'm');
        rest = end.map_or(&[][..], |end| &rest[at + end + 1..]);
    }
    kept.extend_from_slice(rest);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_read_without_its_colours_and_blanks() {
        let plain = Tag::read(b"[rank  3] ").unwrap();
        assert_eq!(Tag::read(b"\x1b[36m[rank  3]\x1b[0m ").unwrap(), plain);
        assert_eq!(plain.of_many(&mut [12, 0, 1, 2]), b"[rank 0-2,12] ");
        assert!(Tag::read(b"[rank 11] ").unwrap().is_like(&plain));
        let other = Tag::read(b"[n7 default0]:").unwrap();
        assert!(!other.is_like(&plain));
        assert_eq!(other.of_many(&mut [1, 0]), b"[n7 default0-1]:");
        assert_eq!(Tag::read(b"[worker] "), None);
        assert_eq!(Tag::read(b"99999999999"), None);
    }

    #[test]
    fn only_the_mark_of_the_same_rank_goes() {
        let tag = Tag::read(b"[rank 1] ").unwrap();
        assert_eq!(tag.without_mark(b"[rank1]:   File"), b"  File");
        assert_eq!(tag.without_mark(b"[rank1]:"), b"");
        assert_eq!(tag.without_mark(b"[rank11]: x"), b"[rank11]: x");
        assert_eq!(tag.without_mark(b"x [rank1]: y"), b"x [rank1]: y");
        let local = Tag::read(b"[default1]:").unwrap();
        assert_eq!(local.without_mark(b"[rank1]: x"), b"[rank1]: x");
    }
}
