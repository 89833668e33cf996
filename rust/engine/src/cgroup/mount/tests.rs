use proptest::prelude::*;

use super::*;

const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
const HYBRID_OWN: &str = "9:name=systemd:/\n8:pids:/build/a:b\n1:cpu,cpuacct:/\n0::/user.slice/x\n";

const UNIFIED: &str = "\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
29 22 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
";
const UNIFIED_OWN: &str = "0::/user.slice/user-1000.slice/session-2.scope\n";

fn place(mountinfo: &str, own: &str, hierarchy: Hierarchy<'_>) -> Option<(String, String)> {
    let place = own_place(mountinfo.as_bytes(), own.as_bytes(), hierarchy)?;
    let text = |path: PathBuf| path.into_os_string().into_string().unwrap();
    Some((text(place.mount_point), text(place.dir)))
}

fn unified(mountinfo: &str, own: &str) -> Option<String> {
    place(mountinfo, own, Hierarchy::Unified).map(|(_, dir)| dir)
}

#[test]
fn a_hybrid_machine_has_v2_beside_the_v1_controllers() {
    assert_eq!(
        unified(HYBRID, HYBRID_OWN).unwrap(),
        "/sys/fs/cgroup/unified/user.slice/x"
    );
    let pids = place(HYBRID, HYBRID_OWN, Hierarchy::Controller("pids")).unwrap();
    assert_eq!(
        pids,
        (
            "/sys/fs/cgroup/pids".to_owned(),
            "/sys/fs/cgroup/pids/build/a:b".to_owned()
        )
    );
    assert_eq!(
        place(HYBRID, HYBRID_OWN, Hierarchy::Controller("cpu")),
        None,
        "listed but not mounted"
    );
}

#[test]
fn a_machine_with_v2_alone_has_no_v1_controller() {
    let dir = "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope";
    assert_eq!(unified(UNIFIED, UNIFIED_OWN).unwrap(), dir);
    assert_eq!(place(UNIFIED, UNIFIED_OWN, Hierarchy::Controller("pids")), None);
}

#[test]
fn in_a_cgroup_namespace_the_own_cgroup_is_the_mount_point() {
    let mountinfo = "1005 994 0:26 / /sys/fs/cgroup ro,nosuid master:9 - cgroup2 cgroup rw,nsdelegate\n";
    assert_eq!(unified(mountinfo, "0::/\n").unwrap(), "/sys/fs/cgroup");
    assert!(!mounts(mountinfo.as_bytes(), Hierarchy::Unified)[0].writable);
}

#[test]
fn a_container_without_a_namespace_strips_the_root_of_its_bind_mount() {
    let mountinfo = "700 6 0:26 /docker/ab12 /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
                     701 6 0:36 /docker/ab12 /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n";
    let own = "8:pids:/docker/ab12/job\n0::/docker/ab12\n";
    assert_eq!(unified(mountinfo, own).unwrap(), "/sys/fs/cgroup");
    let pids = place(mountinfo, own, Hierarchy::Controller("pids")).unwrap();
    assert_eq!(pids.1, "/sys/fs/cgroup/pids/job");
}

#[test]
fn a_process_outside_of_what_the_mounts_show_has_no_directory() {
    let mountinfo = "700 6 0:26 /docker/ab12 /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
    for own in [
        "0::/docker/ab1\n",
        "0::/docker/ab123\n",
        "0::/\n",
        "0::/../other\n",
        "1:pids:/docker/ab12\n",
        "",
    ] {
        assert_eq!(unified(mountinfo, own), None, "{own}");
    }
    assert_eq!(
        unified("30 1 0:1 / /c rw - cgroup2 c rw\n", "0::/../other\n"),
        None
    );
    assert_eq!(
        unified(&HYBRID.replace("cgroup2 cgroup2", "tmpfs cgroup2"), HYBRID_OWN),
        None
    );
}

#[test]
fn a_mount_path_may_hold_any_character() {
    let mountinfo = "30 1 0:1 /a\\040b /mnt/c\\011d\\134e\\012f\\9 rw - cgroup2 c rw\n";
    assert_eq!(unified(mountinfo, "0::/a b/g\n").unwrap(), "/mnt/c\td\\e\nf\\9/g");
}

#[test]
fn a_writable_mount_wins_and_a_later_one_covers_an_earlier() {
    let mountinfo = "1 0 0:1 / /one rw - cgroup2 c rw\n2 0 0:1 / /two rw shared:1 master:2 - cgroup2 c rw\n\
                     3 0 0:1 / /three ro - cgroup2 c rw\n";
    assert_eq!(unified(mountinfo, "0::/x\n").unwrap(), "/two/x");
}

#[test]
fn a_path_is_put_below_a_root_whatever_its_slashes() {
    assert_eq!(rooted(Path::new("/"), Path::new("/sys/x")), Path::new("/sys/x"));
    assert_eq!(
        rooted(Path::new("/tmp/r"), Path::new("//sys/x")),
        Path::new("/tmp/r/sys/x")
    );
}

fn escape(path: &[u8]) -> String {
    path.iter()
        .flat_map(|byte| format!("\\{byte:03o}").into_bytes())
        .map(char::from)
        .collect()
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(mountinfo: Vec<u8>, own: Vec<u8>) {
        for hierarchy in [Hierarchy::Unified, Hierarchy::Controller("pids")] {
            own_place(&mountinfo, &own, hierarchy);
        }
    }

    #[test]
    fn lines_that_are_no_mounts_do_not_hide_one_that_is(noise in "[ -~\n]{0,200}") {
        let found = mounts(format!("{noise}\n{UNIFIED}\n{noise}").as_bytes(), Hierarchy::Unified);
        prop_assert!(found.iter().any(|mount| mount.point == Path::new("/sys/fs/cgroup")));
    }

    #[test]
    fn an_escaped_path_comes_back_as_it_was(name: Vec<u8>) {
        let path = [&b"/"[..], &name].concat();
        let line = format!("1 0 0:1 / {} rw - cgroup2 c rw", escape(&path));
        let found = mounts(line.as_bytes(), Hierarchy::Unified);
        prop_assert_eq!(found[0].point.as_os_str().as_bytes(), path);
    }
}
