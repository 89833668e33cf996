//! Marks for `dsl.control.relay`, which passes the bytes of a console on. A mark says that a line is shown before it
//! is finished. If the bytes end within a line and without a mark, the line goes on in the next bytes.

/// Follows the shown part of an unfinished line.
const UNFINISHED: &[u8] = b"\x10.";
/// The first byte of each mark. In marked output it has no other meaning.
const SIGN: u8 = 0x10;
/// The mark that stands for this byte itself.
const ITSELF: &[u8] = b"\x10-";

/// The bytes to write, with marks. `is_open`: their last line is not finished.
pub(super) fn marked(bytes: Vec<u8>, is_open: bool) -> Vec<u8> {
    let mut out = match memchr::memchr(SIGN, &bytes) {
        None => bytes,
        Some(_) => escaped(&bytes),
    };
    if is_open && !out.is_empty() {
        out.extend_from_slice(UNFINISHED);
    }
    out
}

fn escaped(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + bytes.len() / 8);
    let mut begin = 0;
    for at in memchr::memchr_iter(SIGN, bytes) {
        out.extend_from_slice(&bytes[begin..at]);
        out.extend_from_slice(ITSELF);
        begin = at + 1;
    }
    out.extend_from_slice(&bytes[begin..]);
    out
}
