//! The last bytes of a stream.

/// Keeps the last `limit` bytes; takes no more memory than what has come so far.
#[derive(Debug)]
pub(super) struct Ring {
    bytes: Vec<u8>,
    /// Where the oldest byte is, once the ring is full.
    start: usize,
    limit: usize,
}

impl Ring {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            start: 0,
            limit,
        }
    }

    pub(super) fn push(&mut self, data: &[u8]) {
        let data = &data[data.len().saturating_sub(self.limit)..];
        let free = self.limit - self.bytes.len();
        let (fresh, over) = data.split_at(free.min(data.len()));
        self.bytes.extend_from_slice(fresh);
        let (end, begin) = over.split_at(over.len().min(self.bytes.len() - self.start));
        self.bytes[self.start..self.start + end.len()].copy_from_slice(end);
        self.bytes[..begin.len()].copy_from_slice(begin);
        if !over.is_empty() {
            self.start = (self.start + over.len()) % self.limit;
        }
    }

    pub(super) fn to_vec(&self) -> Vec<u8> {
        let (end, begin) = self.bytes.split_at(self.start);
        [begin, end].concat()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
