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

    pub(super) fn to_vec(&self) -> Vec<u8> {
        self.bytes.iter().copied().collect()
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
