//! How often the kernel's out-of-memory killer has struck in a cgroup.
//!
//! Contract: `oom_kill` in `memory.events` ([cgroup v2], "Memory Interface Files") and in `memory.oom_control`
//! ([cgroup v1], since Linux 4.13). The kernel counts before it sends its SIGKILL, so the count includes every
//! death that we have seen.
//!
//! [cgroup v2]: https://docs.kernel.org/admin-guide/cgroup-v2.html
//! [cgroup v1]: https://docs.kernel.org/admin-guide/cgroup-v1/memory.html

use std::path::{Path, PathBuf};

use super::dir::keyed_value;
use super::mount::{Hierarchy, own_place};
use crate::kernel_file;

/// The counter of the memory cgroup that the caller is in, if one can be read.
#[derive(Debug)]
pub(crate) struct OomCounter(Option<PathBuf>);

impl OomCounter {
    /// Finds the counter. Afterwards each look reads one small file.
    pub(crate) fn own() -> Self {
        let read = |path: &str| kernel_file::read(path).unwrap_or_default();
        let files = files(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
        Self(files.into_iter().find(|path| count(path).is_some()))
    }

    /// Kills so far; 0 without a counter.
    pub(crate) fn kills(&self) -> u64 {
        self.0.as_deref().and_then(count).unwrap_or(0)
    }
}

/// Files that may hold the count: that of cgroup v1 first, if v1 has the memory controller, then that of v2.
fn files(mountinfo: &[u8], cgroup: &[u8]) -> Vec<PathBuf> {
    let places = [
        (Hierarchy::Controller("memory"), "memory.oom_control"),
        (Hierarchy::Unified, "memory.events"),
    ];
    let file = |(hierarchy, name)| Some(own_place(mountinfo, cgroup, hierarchy)?.dir.join(name));
    places.into_iter().filter_map(file).collect()
}

fn count(path: &Path) -> Option<u64> {
    keyed_value(&kernel_file::read(path).ok()?, b"oom_kill")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &[u8] = b"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
        35 31 0:32 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    const UNIFIED: &[u8] = b"30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn the_counter_is_found_by_the_mounts_of_either_version() {
        assert_eq!(
            files(HYBRID, b"4:memory:/docker/1/job\n0::/a\n"),
            [
                Path::new("/sys/fs/cgroup/memory/job/memory.oom_control"),
                Path::new("/sys/fs/cgroup/unified/a/memory.events"),
            ]
        );
        assert_eq!(
            files(UNIFIED, b"0::/user.slice\n"),
            [Path::new("/sys/fs/cgroup/user.slice/memory.events")]
        );
        assert_eq!(files(b"", b"").len(), 0);
    }

    #[test]
    fn both_versions_have_the_count_on_a_line_of_its_own() {
        let path = std::env::temp_dir().join(format!("dsl-oom-{}", std::process::id()));
        for (text, expected) in [
            (&b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"[..], Some(3)),
            (
                b"low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 5\n",
                Some(1),
            ),
            (b"oom_kill_disable 0\nunder_oom 0\n", None),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(count(&path), expected);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(count(&path), None);
        assert_eq!(OomCounter(Some(path)).kills(), 0);
    }
}
