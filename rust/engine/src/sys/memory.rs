//! The pages of this process.

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;

/// Not in every libc.
const MADV_COLLAPSE: i32 = 25;

/// Puts memory into huge pages. Its contents stay the same. Linux 6.1; older kernels refuse.
///
/// [madvise(2)](https://man7.org/linux/man-pages/man2/madvise.2.html)
pub(crate) fn collapse(range: &Range<usize>) -> io::Result<()> {
    let start = std::ptr::without_provenance_mut(range.start);
    // SAFETY: the kernel moves pages below their addresses, which no code can notice, and refuses unmapped
    // addresses.
    let result = unsafe { libc::madvise(start, range.len(), MADV_COLLAPSE) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
