use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::procfs::fake_root::FakeRoot;
use crate::spawn::tests::c_string;

#[test]
fn a_stream_file_is_made_for_owner_and_group() {
    let root = FakeRoot::new();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))
        .unwrap();
    let mask = u32::from_str_radix(mask.trim(), 8).unwrap();
    for (name, append) in [("fresh", false), ("log", true)] {
        let path = root.path().join(name);
        open_stream(&c_string(&path), false, append).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o640 & !mask, "{name}");
    }
}

#[test]
fn a_stream_file_is_emptied_or_kept_and_every_write_goes_to_its_end() {
    let root = FakeRoot::with(&[("fresh", "before"), ("log", "before")]);
    for (name, append, expected) in [("fresh", false, "onetwo"), ("log", true, "beforeonetwo")] {
        let path = root.path().join(name);
        let first = open_stream(&c_string(&path), false, append).unwrap();
        rustix::io::write(&first, b"one").unwrap();
        let second = open_stream(&c_string(&path), false, true).unwrap();
        rustix::io::write(&second, b"t").unwrap();
        rustix::io::write(&first, b"wo").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
    }
}

#[test]
fn an_input_file_must_exist_and_is_only_read() {
    let root = FakeRoot::with(&[("input", "text")]);
    let input = open_stream(&c_string(root.path().join("input")), true, false).unwrap();
    assert_eq!(rustix::io::write(&input, b"x"), Err(Errno::BADF));
    let absent = root.path().join("absent");
    assert_eq!(
        open_stream(&c_string(&absent), true, false).err(),
        Some(Errno::NOENT)
    );
    assert!(!absent.exists());
    let below = root.path().join("input/below");
    assert_eq!(
        open_stream(&c_string(below), false, false).err(),
        Some(Errno::NOTDIR)
    );
}
