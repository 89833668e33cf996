//! Marks in the bytes of a console that another part of dsl passes on. A mark says that a line is shown before it is
//! finished. If the bytes end within a line and without a mark, the line goes on in the next bytes.

use memchr::memmem;

/// Follows the shown part of an unfinished line.
pub const UNFINISHED: &[u8] = b"\x10.";
/// The first byte of each mark. In marked output it has no other meaning.
pub const SIGN: u8 = 0x10;
/// The mark that stands for this byte itself.
pub const ITSELF: &[u8] = b"\x10-";

/// The bytes to write, with marks. `is_open`: their last line is not finished.
pub(in crate::mux) fn marked(bytes: Vec<u8>, is_open: bool) -> Vec<u8> {
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

/// The bytes without their marks. No mark may be cut at the end. Other bytes stay: programs that do not mark their
/// output may write here, too.
pub fn unmarked(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = memchr::memchr(SIGN, rest) {
        out.extend_from_slice(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix(UNFINISHED) {
            rest = after;
        } else {
            out.push(SIGN);
            rest = rest.strip_prefix(ITSELF).unwrap_or(&rest[1..]);
        }
    }
    out.extend_from_slice(rest);
    out
}

/// Where the last mark of an unfinished line ends.
pub fn last_unfinished(bytes: &[u8]) -> Option<usize> {
    memmem::rfind(bytes, UNFINISHED).map(|at| at + UNFINISHED.len())
}
