use super::*;
use crate::spawn::tests::{entries, entry};

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
