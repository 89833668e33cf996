//! A line of `/proc/<pid>/stat`, whose command name is the process's own choice.

#![no_main]

use dsl_engine::procfs::{descendants, environ_carries, parse_stat, status_value};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    if let Some(stat) = parse_stat(text) {
        assert!(stat.pid > 0);
        assert_eq!(descendants(&[stat], &[stat.pid]), []);
    }
    let lines: Vec<_> = text.split(|&byte| byte == b'\n').filter_map(parse_stat).collect();
    assert!(descendants(&lines, &[1]).len() <= lines.len());
    environ_carries(text, b"DSL_JOB_ID", b"token");
    status_value(text, "Uid");
});
