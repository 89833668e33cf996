#![expect(clippy::disallowed_types, reason = "the process here is what is counted")]

use std::process::{Command, Stdio};
use std::sync::{Arc, Barrier};

use proptest::prelude::*;

use super::*;
use crate::procfs::fake_root::FakeRoot;

const NEED: Need = Need {
    workers: 4000,
    threads: 0,
    fds_per_worker: 3,
    fds_base: 40,
};

fn usage(limit: u64, used: u64) -> Usage {
    Usage { limit, used }
}

fn refusal(limits: &Limits, need: &Need) -> String {
    limits.check(need).unwrap_err().to_string()
}

#[test]
fn what_is_unknown_or_unlimited_refuses_nothing() {
    assert_eq!(Limits::default().check(&NEED), Ok(None));
    let all = Need {
        workers: usize::MAX,
        threads: usize::MAX,
        fds_per_worker: usize::MAX,
        fds_base: usize::MAX,
    };
    assert_eq!(Limits::default().check(&all), Ok(None));
}

#[test]
fn the_soft_limit_is_raised_to_what_is_needed_and_only_then() {
    for (soft, hard, raised) in [
        (Some(1024), Some(20_000), Some(12_040)),
        (Some(12_039), Some(12_040), Some(12_040)),
        (Some(12_040), Some(12_040), None),
        (Some(1024), None, Some(12_040)),
        (None, None, None),
    ] {
        let limits = Limits {
            nofile_soft: soft,
            nofile_hard: hard,
            ..Limits::default()
        };
        assert_eq!(limits.check(&NEED), Ok(raised), "{soft:?} {hard:?}");
    }
}

#[test]
fn a_refusal_names_the_limit_the_need_and_the_remedy() {
    let file = PathBuf::from("/sys/fs/cgroup/job/pids.max");
    let more = |what: &str| format!("4000 workers need 4000 more processes, but {what}");
    let table = [
        (
            Limits { nofile_hard: Some(4096), ..Limits::default() },
            "4000 workers need 12040 open files, but the hard limit is 4096: \
             raise it with ulimit -Hn 12040 or LimitNOFILE=12040"
                .to_owned(),
        ),
        (
            Limits { nr_open: Some(12_039), ..Limits::default() },
            "4000 workers need 12040 open files, but fs.nr_open is 12039: raise it with sysctl -w fs.nr_open=12040"
                .to_owned(),
        ),
        (
            Limits { user_tasks: Some(usage(4096, 97)), ..Limits::default() },
            more("this user's limit is 4096 and 97 are in use: raise it with ulimit -u 4097 or LimitNPROC=4097"),
        ),
        (
            Limits { threads_max: Some(usage(4100, 101)), ..Limits::default() },
            more("kernel.threads-max is 4100 and 101 are in use: raise it with sysctl -w kernel.threads-max=4101"),
        ),
        (
            Limits { pid_max: Some(usage(4096, 300)), ..Limits::default() },
            more("kernel.pid_max is 4096 and 300 are in use: raise it with sysctl -w kernel.pid_max=4300"),
        ),
        (
            Limits { cgroup_pids: vec![CgroupPids { file, usage: usage(1000, 12) }], ..Limits::default() },
            more(
                "/sys/fs/cgroup/job/pids.max is 1000 and 12 are in use: \
                 raise it to 4012 (TasksMax= of the unit, --pids-limit of the container)",
            ),
        ),
    ];
    for (limits, message) in table {
        assert_eq!(refusal(&limits, &NEED), message);
    }
}

#[test]
fn a_refusal_of_one_worker_is_in_the_singular() {
    let limits = Limits {
        pid_max: Some(usage(300, 300)),
        ..Limits::default()
    };
    let message = refusal(
        &limits,
        &Need {
            workers: 1,
            threads: 0,
            fds_per_worker: 3,
            fds_base: 0,
        },
    );
    assert!(
        message.starts_with("1 worker needs 1 more process, but"),
        "{message}"
    );
}

#[test]
fn the_last_free_place_is_enough_and_no_worker_needs_none() {
    let full = |used| Limits {
        cgroup_pids: vec![CgroupPids {
            file: PathBuf::new(),
            usage: usage(5000, used),
        }],
        user_tasks: Some(usage(5000, used)),
        pid_max: Some(usage(5000, used)),
        threads_max: Some(usage(5000, used)),
        ..Limits::default()
    };
    assert!(full(1000).check(&NEED).is_ok());
    assert!(full(1001).check(&NEED).is_err());
    assert!(full(6000).check(&Need { workers: 0, ..NEED }).is_ok());
}

#[test]
fn a_limit_of_an_outer_cgroup_binds_too() {
    let level = |name: &str, limit| CgroupPids {
        file: PathBuf::from(name),
        usage: usage(limit, 0),
    };
    let limits = Limits {
        cgroup_pids: vec![level("inner", 9000), level("outer", 3999)],
        ..Limits::default()
    };
    assert_eq!(
        limits.check(&NEED).unwrap_err().limit,
        Limit::Cgroup(level("outer", 3999))
    );
}

const PROC_LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     
Max processes             2000                 unlimited            processes 
Max open files            1024                 524288               files     
";
const USER: &str = "Name:\tx\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n";
const MOUNTS: &str = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";

fn machine(status: &str) -> FakeRoot {
    FakeRoot::with(&[
        ("proc/self/limits", PROC_LIMITS),
        ("proc/self/status", status),
        ("proc/self/uid_map", "         0          0 4294967295\n"),
        ("proc/self/mountinfo", MOUNTS),
        ("proc/self/cgroup", "0::/slice/scope\n"),
        ("proc/loadavg", "0.17 0.11 0.09 1/500 6132\n"),
        ("proc/sys/kernel/pid_max", "32768\n"),
        ("proc/sys/kernel/threads-max", "192731\n"),
        ("proc/sys/fs/nr_open", "1048576\n"),
        ("sys/fs/cgroup/slice/pids.max", "700\n"),
        ("sys/fs/cgroup/slice/pids.current", "60\n"),
        ("sys/fs/cgroup/slice/scope/pids.max", "max\n"),
        ("sys/fs/cgroup/slice/scope/pids.current", "6\n"),
    ])
}

fn few(workers: usize) -> Need {
    Need {
        workers,
        threads: 0,
        fds_per_worker: 1,
        fds_base: 0,
    }
}

#[test]
fn every_limit_is_read_from_its_file() {
    let root = machine(USER);
    let limits = Limits::read(root.path(), &few(10));
    let file = PathBuf::from("/sys/fs/cgroup/slice/pids.max");
    let expected = Limits {
        nofile_soft: Some(1024),
        nofile_hard: Some(524_288),
        nr_open: Some(1_048_576),
        user_tasks: Some(usage(2000, 500)),
        threads_max: Some(usage(192_731, 500)),
        pid_max: Some(usage(32_768, 500)),
        cgroup_pids: vec![CgroupPids {
            file,
            usage: usage(700, 60),
        }],
    };
    assert_eq!(limits, expected);
}

#[test]
fn the_v1_pids_controller_binds_where_it_is_mounted() {
    let root = machine(USER);
    root.file(
        "proc/self/mountinfo",
        b"39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n",
    );
    root.file("proc/self/cgroup", b"8:pids:/job\n0::/\n");
    root.file("sys/fs/cgroup/pids/job/pids.max", b"1200\n");
    root.file("sys/fs/cgroup/pids/job/pids.current", b"7\n");
    let found = Limits::read(root.path(), &few(1)).cgroup_pids;
    let file = PathBuf::from("/sys/fs/cgroup/pids/job/pids.max");
    assert_eq!(
        found,
        [CgroupPids {
            file,
            usage: usage(1200, 7)
        }]
    );
}

#[test]
fn processes_are_counted_one_by_one_only_when_the_upper_bound_is_in_doubt() {
    // The fake machine shows no process at all, so that an exact count is 0.
    let root = machine(USER);
    let used = |workers| {
        let limits = Limits::read(root.path(), &few(workers));
        (limits.user_tasks.unwrap().used, limits.pid_max.unwrap().used)
    };
    assert_eq!(used(1500), (500, 500));
    assert_eq!(used(1501), (0, 0));
}

#[test]
fn the_user_limit_does_not_bind_root_or_a_capable_process() {
    let read = |status: &str, uid_map: &str| {
        let root = machine(status);
        root.file("proc/self/uid_map", uid_map.as_bytes());
        Limits::read(root.path(), &few(1)).user_tasks.is_some()
    };
    let all = "0 0 4294967295\n";
    let capable = |bits: &str| USER.replace("0000000000000000", bits);
    assert!(read(USER, all));
    assert!(!read(&USER.replace("Uid:\t1000", "Uid:\t0"), all));
    assert!(!read(&capable("0000000001000000"), all), "CAP_SYS_RESOURCE");
    assert!(!read(&capable("0000000000200000"), all), "CAP_SYS_ADMIN");
    assert!(
        read(&capable("0000000000400000"), all),
        "a capability that does not matter"
    );
    assert!(
        read(&USER.replace("Uid:\t1000", "Uid:\t0"), "0 1000 1\n"),
        "root of a user namespace is no root"
    );
}

#[test]
fn a_machine_that_shows_nothing_limits_nothing() {
    let root = FakeRoot::new();
    assert_eq!(Limits::read(root.path(), &NEED), Limits::default());
    let root = FakeRoot::with(&[
        ("proc/self/limits", "Max open files   what\nMax processes\n"),
        ("proc/loadavg", "1 2 3 4"),
        ("proc/sys/kernel/pid_max", "-5"),
        ("proc/sys/kernel/threads-max", "99"),
    ]);
    assert_eq!(Limits::read(root.path(), &NEED), Limits::default());
}

#[test]
fn this_machine_fits_one_worker_and_not_a_billion() {
    assert!(preflight(&few(1)).is_ok());
    let message = preflight(&few(1_000_000_000)).unwrap_err().to_string();
    assert!(
        message.starts_with("1000000000 workers need ") && !message.contains('\n'),
        "{message}"
    );
}

#[test]
fn the_descriptor_limits_of_this_process_are_those_of_the_kernel() {
    let limits = Limits::read(Path::new("/"), &few(1));
    let kernel = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    assert_eq!(
        (limits.nofile_soft, limits.nofile_hard),
        (kernel.current, kernel.maximum)
    );
    assert!(
        limits
            .pid_max
            .is_some_and(|pids| pids.used > 0 && pids.limit > pids.used)
    );
}

proptest! {
    #[test]
    fn a_refusal_is_true_and_its_remedy_enough(
        workers in 0..5000_usize, per_worker in 0..5_usize, base in 0..100_usize,
        hard in 0..20_000_u64, limit in 0..5000_u64, used in 0..5000_u64,
    ) {
        let need = Need { workers, threads: 0, fds_per_worker: per_worker, fds_base: base };
        let mut limits = Limits { nofile_soft: Some(hard / 2), nofile_hard: Some(hard), ..Limits::default() };
        limits.pid_max = Some(usage(limit, used));
        let fits = workers == 0 || used + workers as u64 <= limit;
        let opens = (workers * per_worker + base) as u64 <= hard;
        prop_assert_eq!(limits.check(&need).is_ok(), fits && opens);
        while let Err(shortage) = limits.check(&need) {
            if let Limit::OpenFiles(value) = shortage.limit {
                prop_assert!(shortage.needed > value);
                limits.nofile_hard = Some(shortage.needed);
            } else {
                prop_assert!(shortage.needed > limits.pid_max.map_or(0, |pids| pids.limit));
                limits.pid_max = Some(usage(shortage.needed, used));
            }
        }
        let raised = limits.check(&need).unwrap_or_default();
        prop_assert!(raised.is_none_or(|files| Some(files) <= limits.nofile_hard && files > hard / 2));
    }
}

#[test]
fn threads_for_the_group_count_beside_the_workers() {
    let limits = Limits {
        user_tasks: Some(Usage { limit: 10, used: 5 }),
        ..Limits::default()
    };
    let need = |threads| Need {
        threads,
        fds_base: 0,
        ..few(3)
    };
    assert!(limits.check(&need(2)).is_ok());
    let message = limits.check(&need(3)).unwrap_err().to_string();
    assert_eq!(
        message,
        "3 workers need 6 more processes and threads, but this user's limit is 10 and 5 are in use: \
         raise it with ulimit -u 11 or LimitNPROC=11"
    );
}

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
