//! Reading the limits from files.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{CgroupPids, Limits, Need, Usage};
use crate::cgroup::mount::{self, Hierarchy};
use crate::kernel_file;
use crate::procfs::{number, status_value};

const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_RESOURCE: u32 = 24;
const NO_LIMIT: &str = "unlimited";

pub(super) fn limits(root: &Path, need: &Need) -> Limits {
    let proc_root = root.join("proc");
    let resource = kernel_file::read(proc_root.join("self/limits")).unwrap_or_default();
    let resource = String::from_utf8_lossy(&resource);
    let (nofile_soft, nofile_hard) = resource_limit(&resource, "Max open files");
    let (user_limit, _) = resource_limit(&resource, "Max processes");
    let user_limit = user_limit.filter(|_| !is_exempt(&proc_root));
    let sysctl = |name: &str| one_number(&proc_root.join("sys").join(name));
    let pid_max = sysctl("kernel/pid_max");
    let threads_max = sysctl("kernel/threads-max");

    // All tasks of the machine: an upper bound for this user's tasks and for the tasks in this pid namespace.
    let total = kernel_file::read(proc_root.join("loadavg"))
        .ok()
        .and_then(|text| total_tasks(&text));
    let tasks = (need.workers as u64).saturating_add(need.threads as u64);
    let in_doubt = |limit: Option<u64>| {
        limit.is_some_and(|limit| total.is_none_or(|total| total.saturating_add(tasks) > limit))
    };
    let count = (in_doubt(user_limit) || in_doubt(pid_max)).then(|| Count::of(&proc_root));
    let usage = |limit: Option<u64>, exact: fn(&Count) -> u64| {
        let used = count.as_ref().map(exact).or(total);
        limit.zip(used).map(|(limit, used)| Usage { limit, used })
    };
    Limits {
        nofile_soft,
        nofile_hard,
        nr_open: sysctl("fs/nr_open"),
        user_tasks: usage(user_limit, |count| count.own),
        threads_max: threads_max.zip(total).map(|(limit, used)| Usage { limit, used }),
        pid_max: usage(pid_max, |count| count.all),
        cgroup_pids: cgroup_pids(root, &proc_root),
    }
}

/// Soft and hard value of one line of `/proc/self/limits`.
fn resource_limit(text: &str, name: &str) -> (Option<u64>, Option<u64>) {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_default();
    let mut values = line
        .split_ascii_whitespace()
        .map(|value| (value != NO_LIMIT).then(|| value.parse().ok()).flatten());
    (values.next().flatten(), values.next().flatten())
}

/// Whether we are exempt from `RLIMIT_NPROC`: in the first user namespace, root is, and two capabilities exempt
/// others.
fn is_exempt(proc_root: &Path) -> bool {
    let first_namespace = kernel_file::read(proc_root.join("self/uid_map")).is_ok_and(|map| {
        String::from_utf8_lossy(&map)
            .split_ascii_whitespace()
            .eq(["0", "0", "4294967295"])
    });
    let Ok(status) = kernel_file::read(proc_root.join("self/status")) else {
        return false;
    };
    let capabilities = status_value(&status, "CapEff")
        .and_then(|digits| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
        .unwrap_or(0);
    first_namespace
        && (own_uid(&status) == Some(0) || capabilities & (1 << CAP_SYS_ADMIN | 1 << CAP_SYS_RESOURCE) != 0)
}

fn own_uid(status: &[u8]) -> Option<u32> {
    number(
        status_value(status, "Uid")?
            .split(u8::is_ascii_whitespace)
            .next()?,
    )
}

fn one_number(file: &Path) -> Option<u64> {
    number(kernel_file::read(file).ok()?.trim_ascii())
}

/// The second half of the fourth field of `/proc/loadavg`: tasks that exist.
fn total_tasks(text: &[u8]) -> Option<u64> {
    let field = text.split(|&byte| byte == b' ').nth(3)?;
    let slash = field.iter().position(|&byte| byte == b'/')?;
    number(&field[slash + 1..])
}

/// Tasks that can be seen, counted one process at a time.
struct Count {
    all: u64,
    own: u64,
}

impl Count {
    fn of(proc_root: &Path) -> Self {
        let mut count = Self { all: 0, own: 0 };
        let status = kernel_file::read(proc_root.join("self/status")).unwrap_or_default();
        let uid = own_uid(&status);
        for entry in std::fs::read_dir(proc_root).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                let (threads, owner) = threads_of(&entry.path()).unwrap_or_default();
                count.all += threads;
                count.own += if Some(owner) == uid { threads } else { 0 };
            }
        }
        count
    }
}

/// The number of a process's threads, and its user. The link count of `task` is two more than its entries.
fn threads_of(process: &Path) -> Option<(u64, u32)> {
    let tasks = process.join("task").metadata().ok()?;
    Some((tasks.nlink().saturating_sub(2), tasks.uid()))
}

/// The limits on every level from our own cgroup up to the highest visible one, in v1 and v2. All of them bind.
fn cgroup_pids(root: &Path, proc_root: &Path) -> Vec<CgroupPids> {
    let text = |name: &str| kernel_file::read(proc_root.join("self").join(name)).unwrap_or_default();
    let (mountinfo, cgroup) = (text("mountinfo"), text("cgroup"));
    let mut found = Vec::new();
    for hierarchy in [Hierarchy::Unified, Hierarchy::Controller("pids")] {
        let Some(place) = mount::own_place(&mountinfo, &cgroup, hierarchy) else {
            continue;
        };
        for dir in place
            .dir
            .ancestors()
            .take_while(|dir| dir.starts_with(&place.mount_point))
        {
            let file = dir.join("pids.max");
            let limit = one_number(&mount::rooted(root, &file));
            let used = one_number(&mount::rooted(root, &dir.join("pids.current")));
            found.extend(limit.zip(used).map(|(limit, used)| CgroupPids {
                file,
                usage: Usage { limit, used },
            }));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_types, reason = "the process here is what is counted")]

    use std::process::{Command, Stdio};
    use std::sync::{Arc, Barrier};

    use super::*;

    #[test]
    fn every_thread_of_a_process_is_a_task() {
        let release = Arc::new(Barrier::new(9));
        let parked: Vec<_> = (0..8)
            .map(|_| Arc::clone(&release))
            .map(|release| std::thread::spawn(move || release.wait()))
            .collect();
        let (threads, _) = threads_of(Path::new("/proc/self")).unwrap();
        assert!(threads > 8, "{threads}");
        release.wait();
        assert!(parked.into_iter().all(|thread| thread.join().is_ok()));

        let _children = crate::orphans::sharing::beside_others();
        let mut child = Command::new("sleep")
            .arg("600")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let process = format!("/proc/{}", child.id());
        let uid = rustix::process::getuid().as_raw();
        assert_eq!(threads_of(Path::new(&process)), Some((1, uid)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(threads_of(Path::new(&process)), None);
    }

    #[test]
    fn a_count_of_this_machine_holds_this_process_and_its_user() {
        let count = Count::of(Path::new("/proc"));
        assert!(count.own > 0 && count.own <= count.all);
    }
}
