//! `/proc/self/cgroup` and the keyed files of a cgroup.

#![no_main]

use dsl_engine::cgroup::keyed_value;
use dsl_engine::cgroup::mount::{Hierarchy, own_path, own_place};
use libfuzzer_sys::fuzz_target;

const MOUNTINFO: &[u8] =
    b"41 31 0:38 / /c rw - cgroup2 cgroup2 rw\n39 31 0:36 /a /p rw - cgroup cgroup rw,pids\n";

fuzz_target!(|text: &[u8]| {
    for hierarchy in [Hierarchy::Unified, Hierarchy::Controller("pids")] {
        if let Some(path) = own_path(text, hierarchy) {
            assert!(path.is_absolute());
        }
        if let Some(place) = own_place(MOUNTINFO, text, hierarchy) {
            assert!(place.dir.starts_with(&place.mount_point));
            assert!(
                !place
                    .dir
                    .components()
                    .any(|part| part == std::path::Component::ParentDir)
            );
        }
    }
    keyed_value(text, b"populated");
});
