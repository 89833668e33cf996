use proptest::prelude::*;

use super::*;
use crate::procfs::fake_root::FakeRoot;

#[test]
fn lists_of_the_kernel_are_read() {
    let table: [(&str, &[u32]); 7] = [
        ("", &[]),
        ("\n", &[]),
        ("0\n", &[0]),
        ("0-3,8\n", &[0, 1, 2, 3, 8]),
        ("4-4,6,65535", &[4, 6, 65535]),
        (" 1,3 ", &[1, 3]),
        ("0-1\n\0", &[0, 1]),
    ];
    for (text, cpus) in table {
        assert_eq!(parse_cpulist(text.as_bytes()).as_deref(), Ok(cpus), "{text:?}");
    }
}

#[test]
fn the_part_of_a_list_that_is_wrong_is_named() {
    let table = [
        ("0,,2", "\"\" is neither a number nor a range such as 0-3"),
        ("0,x", "\"x\" is neither a number nor a range such as 0-3"),
        ("0-", "\"0-\" is neither a number nor a range such as 0-3"),
        ("0-2-4", "\"0-2-4\" is neither a number nor a range such as 0-3"),
        ("0, 2", "\" 2\" is neither a number nor a range such as 0-3"),
        ("+1", "\"+1\" is neither a number nor a range such as 0-3"),
        (
            "1,\u{1b}[m",
            "\"\\u{1b}[m\" is neither a number nor a range such as 0-3",
        ),
        ("1,5-3", "the range \"5-3\" ends before it starts"),
        (
            "0-3,3",
            "\"3\" overlaps or precedes the part before it: the list must ascend",
        ),
        (
            "4,1-2",
            "\"1-2\" overlaps or precedes the part before it: the list must ascend",
        ),
        (
            "0-4294967295",
            "\"0-4294967295\" is above 65535, the highest number possible",
        ),
        (
            "99999999999999999999999",
            "\"99999999999999999999999\" is above 65535, the highest number possible",
        ),
    ];
    for (text, message) in table {
        assert_eq!(
            parse_cpulist(text.as_bytes()).unwrap_err().to_string(),
            message,
            "{text}"
        );
    }
}

#[test]
fn lists_are_written_in_their_shortest_form() {
    for (cpus, text) in [
        (&[][..], ""),
        (&[7], "7"),
        (&[0, 1], "0-1"),
        (&[0, 2, 3, 4, 9], "0,2-4,9"),
    ] {
        assert_eq!(format_cpulist(cpus), text);
    }
}

#[test]
fn the_first_cpu_or_node_outside_of_the_mask_is_named() {
    let allowed = Allowed {
        cpus: vec![0, 1, 2, 3],
        nodes: vec![0, 1],
    };
    assert_eq!(allowed.refuses(&[0, 3], &[1]), None);
    assert_eq!(
        allowed.refuses(&[1, 9, 10], &[2]).unwrap(),
        "cpu 9 is not among the cpus this process may use (0-3)"
    );
    assert_eq!(
        allowed.refuses(&[], &[0, 2]).unwrap(),
        "NUMA node 2 is not among those whose memory this process may use (0-1)"
    );
}

fn two_nodes() -> FakeRoot {
    FakeRoot::with(&[
        ("sys/devices/system/node/has_memory", "0,2\n"),
        ("sys/devices/system/cpu/online", "0-6\n"),
        (
            "proc/thread-self/status",
            "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t1-127\nMems_allowed_list:\t0-1\n",
        ),
    ])
}

#[test]
fn a_kernel_without_numa_is_one_node() {
    let root = two_nodes();
    std::fs::remove_dir_all(root.path().join("sys/devices/system/node")).unwrap();
    assert_eq!(Allowed::read(root.path()).unwrap().nodes, [0]);
}

#[test]
fn a_broken_topology_is_an_error_that_names_the_file() {
    let root = two_nodes();
    std::fs::remove_file(root.path().join("sys/devices/system/cpu/online")).unwrap();
    let message = Allowed::read(root.path()).unwrap_err().to_string();
    assert!(message.contains("cpu/online"), "{message}");
}

#[test]
fn offline_cpus_and_nodes_without_memory_are_not_allowed() {
    let root = two_nodes();
    let allowed = Allowed::read(root.path()).unwrap();
    assert_eq!(
        (format_cpulist(&allowed.cpus), allowed.nodes),
        ("1-6".to_owned(), vec![0])
    );
}

#[test]
fn the_mask_of_this_thread_is_the_kernels() {
    let allowed = Allowed::read(Path::new("/")).unwrap();
    let mask = rustix::thread::sched_getaffinity(None).unwrap();
    let expected: Vec<u32> = (0..1024).filter(|&cpu| mask.is_set(cpu as usize)).collect();
    assert_eq!(allowed.cpus, expected);
    assert_ne!(allowed.nodes.len(), 0);
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(text: Vec<u8>) {
        let _ = parse_cpulist(&text);
    }

    #[test]
    fn anything_like_a_list_is_ascending_or_refused(text in "[0-9,\\-]{0,24}") {
        if let Ok(cpus) = parse_cpulist(text.as_bytes()) {
            prop_assert!(cpus.is_sorted_by(|left, right| left < right));
        }
    }

    #[test]
    fn a_written_list_reads_back(cpus in prop::collection::btree_set(0..=NUMBER_MAX, 0..50), start in 0..60_000_u32) {
        let cpus: Vec<u32> = cpus.into_iter().filter(|&cpu| cpu < start).chain(start..start + 40).collect();
        prop_assert_eq!(parse_cpulist(format_cpulist(&cpus).as_bytes()), Ok(cpus));
    }
}
