//! What a launcher handed to this process, as one JSON object.

use crate::sys;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// State of this process. Strings hold one character per byte (latin-1), so that nothing is lost.
pub fn state() -> String {
    let mut members = Vec::new();
    for (name, value) in status_numbers() {
        members.push(format!("{}:{}", quote(name.as_bytes()), quote(value.as_bytes())));
    }
    let number = |name: &str, value: i64| format!("{}:{value}", quote(name.as_bytes()));
    let pid_of =
        |pid: Option<rustix::process::Pid>| pid.map_or(0, |pid| i64::from(pid.as_raw_nonzero().get()));
    members.push(number("pid", i64::from(sys::own_pid())));
    members.push(number("ppid", pid_of(rustix::process::getppid())));
    members.push(number("pgid", pid_of(Some(rustix::process::getpgrp()))));
    members.push(number("sid", pid_of(rustix::process::getsid(None).ok())));
    members.push(number(
        "nice",
        rustix::process::getpriority_process(None).map_or(0, i64::from),
    ));
    members.push(number("parent_death_signal", parent_death_signal()));
    members.push(number("umask", i64::from(umask())));
    members.push(format!(
        "\"argv\":{}",
        strings(std::env::args_os().map(|word| word.as_bytes().to_vec()))
    ));
    members.push(format!("\"env\":{}", strings(environment())));
    members.push(format!("\"fds\":{}", descriptors()));
    members.push(format!("\"limits\":{}", strings(lines("/proc/self/limits"))));
    members.push(format!("\"cgroups\":{}", strings(lines("/proc/self/cgroup"))));
    members.push(format!("\"cwd\":{}", link("/proc/self/cwd")));
    members.push(format!("\"exe\":{}", link("/proc/self/exe")));
    members.push(format!("\"memory_policy\":{}", memory_policy()));
    format!("{{{}}}\n", members.join(","))
}

/// Lines of `/proc/self/status` whose values tests compare: masks, ids, affinity.
fn status_numbers() -> Vec<(String, String)> {
    const WANTED: [&str; 11] = [
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "SigPnd",
        "Uid",
        "Gid",
        "Groups",
        "NoNewPrivs",
        "CapEff",
        "Cpus_allowed_list",
        "Mems_allowed_list",
    ];
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    let wanted = pairs.filter(|(name, _)| WANTED.contains(name));
    wanted
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

fn parent_death_signal() -> i64 {
    let signal = rustix::process::parent_process_death_signal().ok().flatten();
    signal.map_or(0, |signal| i64::from(signal.as_raw()))
}

fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(mask);
    mask.bits()
}

/// The environment block as the kernel handed it over: duplicates and order kept.
fn environment() -> Vec<Vec<u8>> {
    let block = std::fs::read("/proc/self/environ").unwrap_or_default();
    let entries = block
        .strip_suffix(b"\0")
        .unwrap_or(&block)
        .split(|&byte| byte == 0);
    entries
        .filter(|entry| !entry.is_empty())
        .map(<[u8]>::to_vec)
        .collect()
}

/// Open descriptors: number to (target, octal flags). Leaves out the descriptor that reads the directory.
fn descriptors() -> String {
    let mut members = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.starts_with("/proc/") && target.ends_with("fd") {
            continue;
        }
        let info = Path::new("/proc/self/fdinfo").join(&name);
        let info = std::fs::read_to_string(info).unwrap_or_default();
        let flags = info
            .lines()
            .find_map(|line| line.strip_prefix("flags:"))
            .unwrap_or("")
            .trim();
        let pair = [target.as_os_str().as_bytes().to_vec(), flags.as_bytes().to_vec()];
        members.push(format!("{}:{}", quote(name.as_bytes()), strings(pair)));
    }
    format!("{{{}}}", members.join(","))
}

fn lines(path: &str) -> Vec<Vec<u8>> {
    let text = std::fs::read(path).unwrap_or_default();
    text.split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(<[u8]>::to_vec)
        .collect()
}

fn link(path: &str) -> String {
    quote(
        std::fs::read_link(path)
            .unwrap_or_default()
            .as_os_str()
            .as_bytes(),
    )
}

/// `[mode, node, node, …]`, or null if the kernel does not tell.
fn memory_policy() -> String {
    let Some((mode, mask)) = sys::memory_policy() else {
        return "null".to_owned();
    };
    let set = |node: &usize| mask[node / 64] & (1_u64 << (node % 64)) != 0;
    let nodes: Vec<_> = (0..mask.len() * 64)
        .filter(set)
        .map(|node| node.to_string())
        .collect();
    let words: Vec<_> = std::iter::once(mode.to_string()).chain(nodes).collect();
    format!("[{}]", words.join(","))
}

fn strings(values: impl IntoIterator<Item = Vec<u8>>) -> String {
    let quoted: Vec<_> = values.into_iter().map(|value| quote(&value)).collect();
    format!("[{}]", quoted.join(","))
}

/// A JSON string with one character per byte.
fn quote(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() + 2);
    text.push('"');
    for &byte in bytes {
        if (b' '..=b'~').contains(&byte) && byte != b'"' && byte != b'\\' {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "\\u{byte:04x}");
        }
    }
    text.push('"');
    text
}
