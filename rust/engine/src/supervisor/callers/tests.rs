use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix};

use super::*;
use crate::handle::{Handle, Waited};

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("dsl-callers-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    folder
}

fn wait(handle: &Handle, timeout: Duration) -> Vec<Event> {
    match handle.wait(Some(timeout), false, || false).unwrap() {
        Waited::Events(events) => events,
        _ => Vec::new(),
    }
}

#[test]
fn a_call_is_reported_once_until_the_callers_are_taken() {
    let folder = folder("once");
    let handle = Handle::new(None).unwrap();
    handle.listen(&folder, "1.sock").unwrap();
    let path = folder.join("1.sock");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    let long = Duration::from_secs(10);
    let _first = UnixStream::connect(&path).unwrap();
    assert_eq!(wait(&handle, long), [Event::Called]);
    let _second = UnixStream::connect(&path).unwrap();
    assert_eq!(wait(&handle, Duration::ZERO), []);
    assert_eq!(handle.take_callers().unwrap().len(), 2);
    assert_eq!(handle.take_callers().unwrap().len(), 0);
    let _third = UnixStream::connect(&path).unwrap();
    assert_eq!(wait(&handle, long), [Event::Called]);
    handle.unlisten().unwrap();
    assert!(!path.exists());
    handle.listen(&folder, "1.sock").unwrap();
    handle.close();
    assert!(!folder.exists());
}

#[test]
fn a_crowd_of_callers_holds_no_more_descriptors_than_the_kernel_lets_wait() {
    let folder = folder("crowd");
    let callers = Callers::new(&folder, "1.sock").unwrap();
    let connect = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let address = SocketAddrUnix::new(folder.join("1.sock")).unwrap();
        rustix::net::connect(&socket, &address).map(|()| socket)
    };
    let crowd: Vec<_> = (0..100).filter_map(|_| connect().ok()).collect();
    assert!((16..40).contains(&crowd.len()), "{}", crowd.len());
    assert_eq!(callers.take().unwrap().len(), WAITING as usize);
    drop(callers);
    assert!(!folder.exists());
}

#[test]
fn a_folder_that_others_could_enter_is_refused() {
    let open = folder("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o755)).unwrap();
    assert!(Callers::new(&open, "1.sock").is_err());
    let linked = folder("linked");
    fs::set_permissions(&open, Permissions::from_mode(0o700)).unwrap();
    symlink(&open, &linked).unwrap();
    assert!(Callers::new(&linked, "1.sock").is_err());
    assert!(Callers::new(&open, "1.sock").is_ok());
    fs::remove_file(linked).unwrap();
}

#[test]
fn jobs_that_come_and_go_do_not_take_the_folder_from_each_other() {
    let folder = folder("many");
    let come_and_go = |number: u32| {
        let folder = folder.clone();
        std::thread::spawn(move || {
            for _ in 0..200 {
                let callers = Callers::new(&folder, &format!("{number}.sock")).unwrap();
                assert!(folder.join(format!("{number}.sock")).exists());
                drop(callers);
            }
        })
    };
    let threads: Vec<_> = (0..4).map(come_and_go).collect();
    assert!(threads.into_iter().all(|thread| thread.join().is_ok()));
    assert!(!folder.exists());
}

#[test]
fn a_path_that_is_too_long_for_an_address_does_no_harm() {
    let top = folder("long");
    let deep = top.join("x".repeat(120));
    fs::create_dir_all(&top).unwrap();
    let callers = Callers::new(&deep, "1.sock").unwrap();
    assert!(deep.join("1.sock").exists());
    drop(callers);
    fs::remove_dir_all(top).unwrap();
}

#[test]
fn sockets_of_killed_jobs_go_with_the_next_job_and_those_of_others_stay() {
    let folder = folder("left");
    let callers = Callers::new(&folder, "1-a.sock").unwrap();
    let leave = |name: &str| UnixListener::bind(folder.join(name)).map(drop).unwrap();
    leave("2147483646-b.sock");
    leave(&format!("{}-c.sock", std::process::id()));
    let alive = UnixListener::bind(folder.join("2147483645-d.sock")).unwrap();
    drop(callers);
    let entries = fs::read_dir(&folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|one| one.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let own = format!("{}-c.sock", std::process::id());
    let mut expected = [own, "2147483645-d.sock".to_owned()];
    expected.sort();
    assert_eq!(names, expected);
    drop(alive);
    fs::remove_dir_all(folder).unwrap();
}
