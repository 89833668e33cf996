//! Keeps the last bytes of a stream.

use std::collections::VecDeque;

/// Keeps the last `limit` bytes.
#[derive(Debug)]
pub(super) struct Ring {
    bytes: VecDeque<u8>,
    limit: usize,
}

impl Ring {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            bytes: VecDeque::new(),
            limit,
        }
    }

    pub(super) fn push(&mut self, data: &[u8]) {
        let data = &data[data.len().saturating_sub(self.limit)..];
        let too_many = (self.bytes.len() + data.len()).saturating_sub(self.limit);
        self.bytes.drain(..too_many);
        self.bytes.extend(data);
    }

    /// The last line that is not blank, or the end of it: at most `limit` bytes. A carriage return ends a line, too.
    pub(super) fn last_line(&self, limit: usize) -> Vec<u8> {
        let is_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
        let from = self
            .bytes
            .iter()
            .rev()
            .skip_while(|byte| byte.is_ascii_whitespace());
        let mut line: Vec<u8> = from
            .take_while(|byte| !is_end(byte))
            .take(limit)
            .copied()
            .collect();
        line.reverse();
        line
    }

    pub(super) fn to_vec(&self) -> Vec<u8> {
        self.bytes.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_last_line_is_the_last_one_that_is_not_blank() {
        for (text, limit, line) in [
            ("", 9, ""),
            (" \n\r\n", 9, ""),
            ("one\ntwo\n", 9, "two"),
            ("one\ntw", 9, "tw"),
            ("50%\r60%\r\n \n", 9, "60%"),
            (" indented\n", 9, " indented"),
            ("a long line\n", 4, "line"),
        ] {
            let mut ring = Ring::new(100);
            ring.push(text.as_bytes());
            assert_eq!(ring.last_line(limit), line.as_bytes(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn holds_the_end_of_what_came(
            limit in 1usize..40,
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..50), 0..20),
        ) {
            let mut ring = Ring::new(limit);
            for piece in &pieces {
                ring.push(piece);
            }
            let all = pieces.concat();
            prop_assert_eq!(ring.to_vec(), &all[all.len().saturating_sub(limit)..]);
        }
    }
}
