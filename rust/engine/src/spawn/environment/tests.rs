use std::path::Path;

use super::*;
use crate::procfs::fake_root::FakeRoot;
use crate::spawn::tests::{c_string, entries, entry, programs};

#[test]
fn a_value_is_the_one_that_the_program_gets() {
    let table = EnvTable::new(&entries(&["A=1", "PATH=/a", "PATH=/b"]), &[], entry("T=t"));
    let own = entries(&["A=2", "A=3"]);
    assert_eq!(table.value(&own, b"A"), Some(&b"3"[..]));
    assert_eq!(table.value(&[], b"A"), Some(&b"1"[..]));
    assert_eq!(table.value(&own, b"PATH"), Some(&b"/b"[..]));
    assert_eq!(table.value(&own, b"T"), Some(&b"t"[..]));
    assert_eq!(table.value(&own, b"B"), None);
}

fn search_path(root: &FakeRoot, items: &[&str]) -> Vec<u8> {
    let items: Vec<String> = items
        .iter()
        .map(|item| root.path().join(item).display().to_string())
        .collect();
    items.join(":").into_bytes()
}

#[test]
fn a_program_is_the_first_executable_on_the_path() {
    let root = programs(&[
        ("first/tool", 0o755),
        ("second/tool", 0o755),
        ("plain/tool", 0o644),
        ("folder/tool/inside", 0o755),
    ]);
    let expect = |items: &[&str], expected: Result<&str, Errno>| {
        let expected = expected.map(|name| c_string(root.path().join(name)));
        let found = find_program(c"tool", &search_path(&root, items), c".");
        assert_eq!(found, expected, "{items:?}");
    };
    expect(&["first", "second"], Ok("first/tool"));
    expect(&["second", "first"], Ok("second/tool"));
    expect(&["absent", "second"], Ok("second/tool"));
    expect(&["plain", "second"], Ok("second/tool"));
    expect(&["folder", "second"], Ok("second/tool"));
    expect(&["plain/tool", "second"], Ok("second/tool"));
    expect(&["absent"], Err(Errno::NOENT));
    expect(&["plain"], Err(Errno::ACCESS));
    expect(&["plain", "absent"], Err(Errno::ACCESS));
    expect(&["folder"], Err(Errno::ACCESS));
}

#[test]
fn an_empty_item_of_the_path_is_the_current_directory() {
    let root = programs(&[("bin/tool", 0o755)]);
    let current = std::env::current_dir().unwrap();
    let up = "../".repeat(current.components().count() - 1);
    let below = root.path().join("bin/tool");
    let relative = c_string(Path::new(&up).join(below.strip_prefix("/").unwrap()));
    let expected = CString::new([b"./", relative.as_bytes()].concat()).unwrap();
    for search in [&b""[..], b":/absent", b"/absent:", b"/absent::/other"] {
        assert_eq!(find_program(&relative, search, c"."), Ok(expected.clone()));
    }
}
