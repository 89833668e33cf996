//! Complete writes to a file.

use std::os::fd::AsFd;

use rustix::io::Errno;

/// Writes all of `data`. An error comes with the number of bytes that were not written.
pub(super) fn write_all(file: impl AsFd, mut data: &[u8]) -> Result<(), (Errno, usize)> {
    while !data.is_empty() {
        match rustix::io::retry_on_intr(|| rustix::io::write(&file, data)) {
            Ok(0) => return Err((Errno::IO, data.len())),
            Ok(count) => data = &data[count..],
            Err(errno) => return Err((errno, data.len())),
        }
    }
    Ok(())
}
