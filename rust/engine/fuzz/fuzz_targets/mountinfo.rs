//! `/proc/self/mountinfo`, whose paths are anybody's choice who may mount.

#![no_main]

use dsl_engine::cgroup::mount::{Hierarchy, mounts, own_place};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    for hierarchy in [Hierarchy::Unified, Hierarchy::Controller("pids")] {
        let found = mounts(text, hierarchy);
        for own in [
            &b"0::/user.slice/x\n8:pids:/user.slice/x\n"[..],
            b"0::/\n8:pids:/\n",
            text,
        ] {
            if let Some(place) = own_place(text, own, hierarchy) {
                assert!(place.dir.starts_with(&place.mount_point));
                assert!(found.iter().any(|mount| mount.point == place.mount_point));
            }
        }
    }
});
