//! What is too long for a message goes along with it as a file in memory.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

/// More than words and environment of a process can have.
const MOST_BYTES: u64 = 16 << 20;
/// What nobody can do to a sealed file, not even its owner.
const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);

/// A file in memory that holds these bytes.
pub(super) fn pack(name: &CStr, bytes: &[u8]) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create(name, flags)?);
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

/// Keeps everybody from changing a file from now on.
pub(super) fn seal(file: &File) -> io::Result<()> {
    Ok(fcntl_add_seals(file, SEALS)?)
}

/// Whether a file is in memory and cannot change any more, so that it is read as it was checked, and at once.
pub(super) fn is_sealed(file: impl AsFd) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS))
}

/// The bytes of a file. Fails with `FileTooLarge` if these are more than anybody needs.
pub(super) fn unpack(file: &File) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    if length > MOST_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_file_holds_what_was_packed_for_good() {
        let file = pack(c"test", b"text").unwrap();
        assert!(!is_sealed(&file));
        seal(&file).unwrap();
        assert!(is_sealed(&file));
        assert_eq!(unpack(&file).unwrap(), b"text");
        assert!(file.write_all_at(b"x", 0).is_err() && file.set_len(2).is_err() && file.set_len(9).is_err());
    }

    #[test]
    fn no_file_takes_more_memory_than_the_longest_parcel() {
        let file = pack(c"test", b"text").unwrap();
        file.set_len(MOST_BYTES + 1).unwrap();
        assert_eq!(unpack(&file).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(!is_sealed(File::open("/dev/zero").unwrap()));
    }
}
