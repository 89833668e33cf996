//! What is told to the one who passes a console's bytes on: which lines end where they do because they are shown
//! before they are finished. All others go on in the next bytes. `dsl.control.relay` reads this.

/// Stands behind what is shown of an unfinished line.
const UNFINISHED: &[u8] = b"\x10.";
/// This byte stands for nothing else than the begin of a sign.
const SIGN: u8 = 0x10;
/// The sign for that byte itself.
const ITSELF: &[u8] = b"\x10-";

/// The bytes to write; `is_open`: their last line is not finished.
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
