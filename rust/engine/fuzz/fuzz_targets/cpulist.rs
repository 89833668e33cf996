//! A CPU list: the kernel's, or a user's `--bind_core_list`.

#![no_main]

use dsl_engine::affinity::{NUMBER_MAX, format_cpulist, parse_cpulist};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| match parse_cpulist(text) {
    Ok(cpus) => {
        assert!(cpus.is_sorted_by(|left, right| left < right));
        assert!(cpus.last().is_none_or(|&last| last <= NUMBER_MAX));
        assert_eq!(parse_cpulist(format_cpulist(&cpus).as_bytes()), Ok(cpus));
    }
    Err(error) => assert!(!error.to_string().chars().any(char::is_control)),
});
