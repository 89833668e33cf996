//! Messages with descriptors, over a socket that preserves message boundaries. What is too long for a message goes along
//! with it as a file in memory.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// The most descriptors that the kernel takes with one message (`SCM_MAX_FD`).
const MOST_DESCRIPTORS: usize = 253;
/// Maximum length of a message.
const MOST_BYTES: usize = 4096;
/// More than words and environment of a process can have.
const PARCEL_BYTES: u64 = 16 << 20;
/// What nobody can do to a sealed file, not even its owner.
const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);

/// Two connected ends; neither survives `execve`.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Sends one message. With `wait` false it fails with `WouldBlock` if the other side takes no message now.
pub(super) fn send(link: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], wait: bool) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let has_room = fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds));
    if !has_room || fds.len() > MOST_DESCRIPTORS {
        return Err(io::Error::other("too many descriptors"));
    }
    let mut flags = SendFlags::NOSIGNAL;
    if !wait {
        flags |= SendFlags::DONTWAIT;
    }
    let link = link.as_fd();
    let bytes = [IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| sendmsg(link, &bytes, &mut control, flags))?;
    Ok(())
}

/// A message and its descriptors, which do not survive `execve`.
pub(super) type Message = (Vec<u8>, Vec<OwnedFd>);

/// The next message; `None` if none is there yet. Fails with `UnexpectedEof` if the other side is gone.
pub(super) fn receive(link: impl AsFd) -> io::Result<Option<Message>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; MOST_BYTES];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let link = link.as_fd();
    let count = loop {
        match recvmsg(link, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(received) => break received.bytes,
            // The other side has closed without reading all our messages. The messages that it has sent still come.
            Err(Errno::CONNRESET) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    };
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if count == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes.truncate(count);
    Ok(Some((bytes, fds)))
}

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
    if length > PARCEL_BYTES {
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
    fn messages_stay_apart_and_bring_their_descriptors() {
        let (one, other) = pair().unwrap();
        assert!(receive(&other).unwrap().is_none());
        let (read, write) = rustix::pipe::pipe().unwrap();
        send(&one, b"with", &[write.as_fd(), read.as_fd()], false).unwrap();
        send(&one, b"without", &[], false).unwrap();
        drop(write);
        let (bytes, fds) = receive(&other).unwrap().unwrap();
        assert_eq!((&bytes[..], fds.len()), (&b"with"[..], 2));
        rustix::io::write(&fds[0], b"x").unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0; 2]), Ok(1));
        let (bytes, fds) = receive(&other).unwrap().unwrap();
        assert_eq!((&bytes[..], fds.len()), (&b"without"[..], 0));
    }

    #[test]
    fn a_hung_up_link_is_told_from_an_empty_one_after_the_last_message() {
        let (one, other) = pair().unwrap();
        send(&one, b"last", &[], false).unwrap();
        drop(one);
        assert_eq!(receive(&other).unwrap().unwrap().0, b"last");
        assert_eq!(receive(&other).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let refused = send(&other, b"nobody", &[], false).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn what_was_sent_is_heard_although_the_sender_has_left_messages_unread() {
        let (one, other) = pair().unwrap();
        send(&one, b"unread", &[], false).unwrap();
        send(&other, b"last", &[], false).unwrap();
        drop(other);
        assert_eq!(receive(&one).unwrap().unwrap().0, b"last");
        assert_eq!(receive(&one).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn who_takes_no_messages_holds_nobody_up() {
        let (one, _other) = pair().unwrap();
        let refused = (0..100_000).find_map(|_| send(&one, b"again", &[], false).err());
        assert_eq!(refused.unwrap().kind(), io::ErrorKind::WouldBlock);
    }

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
        file.set_len(PARCEL_BYTES + 1).unwrap();
        assert_eq!(unpack(&file).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(!is_sealed(File::open("/dev/zero").unwrap()));
    }
}
