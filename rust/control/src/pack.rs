//! Makes output smaller for its way through ssh. Pure.
//!
//! ssh and sshd encrypt, copy and decrypt each byte. For text that takes longer than to pack and to unpack it with LZ4.
//! A packed payload is 4 bytes of length (big-endian) and an LZ4 block: whole frames of output of that length.

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

use crate::frame::{Damaged, HEAD_LEN, packed_frame};

/// Frames that are shorter together are sent as they are.
const LEAST: usize = 1 << 10;
/// Most bytes of frames that are packed together.
pub const MOST: usize = 256 << 10;
/// Packing saves more processor time on both hosts together than it takes if it leaves at most one byte of so many.
const PART: usize = 3;
/// After a chunk for which it is not worth it, we send so many as they are, and try again.
const PAUSE: u32 = 31;
/// Bytes before the LZ4 block in a frame.
const BEGIN: usize = HEAD_LEN + 4;

/// Packs the output of one link.
#[derive(Default)]
pub struct Packer {
    table: Option<CompressTable>,
    /// Room for what is packed.
    room: Vec<u8>,
    pause: u32,
}

impl Packer {
    /// Frames of output, or one frame with them if that is worth it.
    pub fn pack(&mut self, frames: Vec<u8>) -> Vec<u8> {
        if !(LEAST..=MOST).contains(&frames.len()) {
            return frames;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return frames;
        }
        let most = BEGIN + get_maximum_output_size(frames.len());
        if self.room.len() < most {
            self.room.resize(most, 0);
        }
        let table = self.table.get_or_insert_default();
        match compress_into_with_table(&frames, &mut self.room[BEGIN..], table) {
            Ok(length) if BEGIN + length <= frames.len() / PART => {
                let mut packed = self.room[..BEGIN + length].to_vec();
                packed[HEAD_LEN..BEGIN].copy_from_slice(&(frames.len() as u32).to_be_bytes());
                packed_frame(packed)
            }
            _ => {
                self.pause = PAUSE;
                frames
            }
        }
    }
}

/// Writes the frames of a packed payload to `frames`, instead of what is there.
pub fn unpack(payload: &[u8], frames: &mut Vec<u8>) -> Result<(), Damaged> {
    let damaged = || Damaged("has sent damaged output".into());
    let (length, block) = payload.split_first_chunk::<4>().ok_or_else(damaged)?;
    let length = u32::from_be_bytes(*length) as usize;
    if length > MOST {
        return Err(damaged());
    }
    frames.resize(length, 0);
    match decompress_into(block, frames) {
        Ok(count) if count == length => Ok(()),
        _ => Err(damaged()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Frame, LONGEST, Parser};
    use dsl_engine::spec::Console;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn output(data: &[u8]) -> Vec<u8> {
        Frame::Output {
            console: Console::Stdout,
            data,
            goes_on: false,
        }
        .to_bytes()
    }

    /// The payload, if the frames were packed.
    fn payload(bytes: &[u8]) -> Option<Vec<u8>> {
        let mut found = None;
        let hear = |frame: Frame<'_>| -> Result<(), Damaged> {
            if let Frame::Packed(payload) = frame {
                found = Some(payload.to_vec());
            }
            Ok(())
        };
        Parser::new(LONGEST).feed(bytes, hear).unwrap();
        found
    }

    fn noise(length: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..length).map(|_| next()).collect()
    }

    #[test]
    fn text_is_packed_and_comes_out_as_it_went_in() {
        let text = "step 1200 loss 2.3025 tokens/s 41213\n".repeat(1000);
        let frames = output(text.as_bytes());
        let sent = Packer::default().pack(frames.clone());
        assert!(sent.len() < frames.len() / 10);
        let mut found = b"what was there".to_vec();
        unpack(&payload(&sent).unwrap(), &mut found).unwrap();
        assert_eq!(found, frames);
    }

    #[test]
    fn little_output_goes_as_it_is() {
        let frames = output(&[b'x'; LEAST - HEAD_LEN - 2]);
        assert_eq!(Packer::default().pack(frames.clone()), frames);
    }

    #[test]
    fn what_cannot_be_packed_is_tried_seldom() {
        let (dense, text) = (output(&noise(40_000)), output(&b"x".repeat(40_000)));
        let mut packer = Packer::default();
        assert_eq!(packer.pack(dense.clone()), dense);
        for _ in 0..PAUSE {
            assert_eq!(packer.pack(text.clone()), text);
        }
        assert!(packer.pack(text.clone()).len() < 1000);
    }

    #[test]
    fn a_length_that_is_not_true_is_refused() {
        let frames = output(&b"x".repeat(40_000));
        let true_payload = payload(&Packer::default().pack(frames.clone())).unwrap();
        for length in [
            0,
            1,
            frames.len() - 1,
            frames.len() + 1,
            MOST + 1,
            u32::MAX as usize,
        ] {
            let mut payload = true_payload.clone();
            payload[..4].copy_from_slice(&(length as u32).to_be_bytes());
            let mut found = Vec::new();
            assert!(unpack(&payload, &mut found).is_err(), "{length}");
            assert!(found.capacity() <= MOST, "{length}");
        }
        assert!(unpack(&true_payload[..3], &mut Vec::new()).is_err());
    }

    proptest! {
        #[test]
        fn damaged_output_does_no_harm(
            length in 0..MOST as u32 + 9,
            block in vec(any::<u8>(), 0..400),
            edits in vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        ) {
            let mut payload = length.to_be_bytes().to_vec();
            payload.extend(&block);
            let _ = unpack(&payload, &mut Vec::new());

            let frames = output(&[&block[..], &[b'x'; 3000], &block[..]].concat());
            let mut sent = Packer::default().pack(frames);
            for (place, byte) in edits {
                let at = BEGIN + place.index(sent.len() - BEGIN);
                sent[at] = byte;
            }
            let _ = unpack(&sent[HEAD_LEN..], &mut Vec::new());
        }
    }
}
