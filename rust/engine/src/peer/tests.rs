use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;

use rustix::process::getpid;

use super::*;
use crate::procfs::fake_root::FakeRoot;

fn own() -> i32 {
    getpid().as_raw_nonzero().get()
}

/// A `/proc` in which this process has a namespace of its own of the kind `other`, and started at `start`.
fn proc_where(other: &str, start: u64) -> FakeRoot {
    let root = FakeRoot::new();
    for who in ["thread-self".to_owned(), own().to_string()] {
        root.file(&format!("{who}/ns/.keep"), b"");
        for kind in [
            "pid",
            "pid_for_children",
            "user",
            "time",
            "time_for_children",
            "mnt",
            "cgroup",
            "ipc",
            "net",
            "uts",
        ] {
            let number = u8::from(who != "thread-self" && kind == other);
            symlink(
                format!("{kind}:[{number}]"),
                root.path().join(format!("{who}/ns/{kind}")),
            )
            .unwrap();
        }
        symlink("/", root.path().join(format!("{who}/root"))).unwrap();
    }
    started_at(&root, start);
    root
}

fn started_at(root: &FakeRoot, start: u64) {
    let text = format!(
        "{} (a) S 1 7 8 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 {start} 1 2\n",
        own()
    );
    root.file(&format!("{}/stat", own()), text.as_bytes());
}

fn found(root: &FakeRoot, socket: impl AsFd) -> Result<Peer, Stranger> {
    let mut procfs = ProcFs::open_at(root.path()).unwrap();
    Peer::found(&mut procfs, socket.as_fd(), |_, _| Ok(None))
}

#[test]
fn a_process_of_this_user_here_is_told_by_its_pid() {
    let (one, _other) = UnixStream::pair().unwrap();
    let peer = Peer::of(&one).unwrap();
    assert_eq!(peer.pid(), own());
    let mut procfs = ProcFs::open().unwrap();
    assert!(peer.is_there(&mut procfs));
    let pidfd = peer.pidfd.unwrap();
    assert_eq!(procfs.pid_of(pidfd.as_fd()).unwrap(), Some(own()));
    let by_number = pin_by_number(own()).unwrap().unwrap();
    assert_eq!(procfs.pid_of(by_number.as_fd()).unwrap(), Some(own()));
}

#[test]
fn each_namespace_that_is_another_one_is_named() {
    let (one, _other) = UnixStream::pair().unwrap();
    assert_eq!(found(&proc_where("", 5), &one).unwrap().pid(), own());
    for (file, place) in [
        ("pid", "pid namespace"),
        ("pid_for_children", "pid namespace"),
        ("user", "user namespace"),
        ("time", "time namespace"),
        ("mnt", "mount namespace"),
        ("cgroup", "cgroup namespace"),
        ("ipc", "ipc namespace"),
        ("net", "network namespace"),
        ("uts", "uts namespace"),
    ] {
        let stranger = found(&proc_where(file, 5), &one).unwrap_err();
        assert_eq!(stranger, Stranger::Elsewhere(place));
        assert_eq!(stranger.to_string(), format!("runs in another {place}"));
        assert_eq!(io::Error::from(stranger).kind(), io::ErrorKind::PermissionDenied);
    }
    let chrooted = proc_where("", 5);
    fs::remove_file(chrooted.path().join(format!("{}/root", own()))).unwrap();
    symlink(".", chrooted.path().join(format!("{}/root", own()))).unwrap();
    let stranger = found(&chrooted, &one).unwrap_err();
    assert_eq!(stranger, Stranger::Elsewhere("root directory"));
}

/// On kernels without pidfds only the start time tells a process from a later one with its number.
#[test]
fn a_later_process_with_its_number_is_not_taken_for_it() {
    let (one, _other) = UnixStream::pair().unwrap();
    let root = proc_where("", 5);
    let peer = found(&root, &one).unwrap();
    let mut procfs = ProcFs::open_at(root.path()).unwrap();
    assert!(peer.is_there(&mut procfs));
    started_at(&root, 6);
    assert!(!peer.is_there(&mut procfs));
    fs::remove_file(root.path().join(format!("{}/stat", own()))).unwrap();
    assert!(!peer.is_there(&mut procfs));
    let stranger = found(&root, &one).unwrap_err();
    assert_eq!(stranger, Stranger::Gone);
    assert_eq!(io::Error::from(stranger).kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn nobody_is_at_the_other_end_of_a_socket_that_is_not_connected() {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    assert_eq!(Peer::of(&socket).unwrap_err(), Stranger::OtherUser);
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    assert!(matches!(Peer::of(&pipe).unwrap_err(), Stranger::Unknown(_)));
}
