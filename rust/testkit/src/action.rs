//! The language of `dsl-testchild`: words that are carried out one after another.
//!
//! | words | meaning |
//! | --- | --- |
//! | `exit K`, `raise SIG`, `stop`, `pause`, `sleep MS` | end, signal, stop itself, sleep |
//! | `ignore LIST`, `default LIST`, `block LIST`, `catch LIST` | dispositions and mask (`LIST`: `TERM,USR1` or `ALL`) |
//! | `trace FILE` | from now on append `signal pid sender monotonic_ns` for each caught signal |
//! | `await SIG N`, `counts FILE` | sleep until it was caught N times; write all counts as JSON |
//! | `ready`, `say TEXT`, `complain TEXT`, `lines N BYTES` | a line `ready pid=N`, text on stdout, on stderr, N lines |
//! | `numbered FD N BYTES STYLE`, `flood MIB LINE WRITE`, `raw TEXT` | lines to be checked, lines at full speed, see [`crate::output`]; text with `\n`, `\r`, `\e` |
//! | `touch FILE`, `note FILE TEXT`, `stamp FILE`, `dump FILE` | create it holding the pid, append a line, the monotonic clock, the state as JSON |
//! | `wait FILE`, `waitpid FILE` | sleep until the file exists; until the process whose pid it holds has died |
//! | `setsid`, `setuid N`, `close FD`, `alloc MIB` | what they say |
//! | `only RANKS [ … ]` | do the words if RANK is in `0,3`, or is not in `!0,3` |
//! | `child [ … ]`, `daemon [ … ]`, `threadchild [ … ]` | do the words in another process, see [`crate::family`] |
//! | `hop N US`, `churn N US`, `bloom DEPTH US`, `vforkblock` | bounded trees, see [`crate::family`] |
//! | `exec WORD…` | become another program |
//!
//! In file names and texts `%r` is RANK and `%p` the pid. Words that begin with `--` are skipped, so that a
//! launcher may add `--local_rank=N`. After the last word the program ends with 0.

use crate::output::{self, Style};
use crate::sys::{self, Disposition};
use crate::{dump, fail, family, signals};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Uid, pidfd_open};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::IntoRawFd;
use std::path::Path;

/// Words of one program, taken from the front.
struct Words<'a>(&'a [String]);

impl<'a> Words<'a> {
    fn next(&mut self) -> Option<&'a str> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn need(&mut self, what: &str) -> &'a str {
        self.next().unwrap_or_else(|| fail(&format!("{what} is missing")))
    }

    fn number(&mut self, what: &str) -> u64 {
        let word = self.need(what);
        word.parse()
            .unwrap_or_else(|_| fail(&format!("{what} must be a number, got {word:?}")))
    }

    fn text(&mut self, what: &str) -> String {
        let rank = rank();
        self.need(what)
            .replace("%r", &rank)
            .replace("%p", &sys::own_pid().to_string())
    }

    fn signals(&mut self) -> Vec<i32> {
        let word = self.need("signal");
        signals::parse_list(word).unwrap_or_else(|| fail(&format!("unknown signal in {word:?}")))
    }

    /// The words between `[` and the matching `]`.
    fn block(&mut self) -> &'a [String] {
        if self.next() != Some("[") {
            fail("a block must begin with [");
        }
        let words = self.0;
        let mut depth = 1;
        for (index, word) in words.iter().enumerate() {
            depth += i32::from(word == "[") - i32::from(word == "]");
            if depth == 0 {
                self.0 = &words[index + 1..];
                return &words[..index];
            }
        }
        fail("a block must end with ]")
    }
}

fn rank() -> String {
    std::env::var("RANK").unwrap_or_else(|_| "x".to_owned())
}

/// Carries out the words. Returns after the last, unless a word ends the process.
pub fn run(words: &[String]) {
    let mut words = Words(words);
    while let Some(word) = words.next() {
        if word.starts_with("--") {
            continue;
        }
        if !(own_state(word, &mut words) || files(word, &mut words) || processes(word, &mut words)) {
            fail(&format!("unknown word {word:?}"));
        }
    }
}

fn own_state(word: &str, words: &mut Words) -> bool {
    match word {
        "exit" => sys::exit_now(words.number("exit code") as i32),
        "raise" => words.signals().into_iter().for_each(|signal| {
            sys::kill(sys::own_pid(), signal);
        }),
        "stop" => drop(sys::kill(sys::own_pid(), libc::SIGSTOP)),
        "pause" => family::pause(),
        "sleep" => family::sleep_us(words.number("milliseconds") * 1000),
        "ignore" => sys::dispose(&words.signals(), Disposition::Ignore),
        "default" => sys::dispose(&words.signals(), Disposition::Default),
        "catch" => sys::dispose(&words.signals(), Disposition::Catch),
        "block" => sys::block(&words.signals()),
        "await" => {
            let signals = words.signals();
            let times = words.number("count") as u32;
            sys::suspend_until(|| signals.iter().all(|&signal| sys::caught(signal) >= times));
        }
        "setsid" => drop(rustix::process::setsid()),
        "setuid" => {
            let user = Uid::from_raw(words.number("user id") as u32);
            if rustix::thread::set_thread_uid(user).is_err() {
                fail("cannot change the user");
            }
        }
        "close" => sys::close(words.number("descriptor") as i32),
        "alloc" => fill_memory(words.number("MiB")),
        _ => return false,
    }
    true
}

fn fill_memory(mib: u64) {
    let mut kept = Vec::new();
    for _ in 0..mib {
        kept.push(vec![1_u8; 1 << 20]);
    }
    std::mem::forget(std::hint::black_box(kept));
}

fn files(word: &str, words: &mut Words) -> bool {
    match word {
        "ready" => sys::write_all(1, format!("ready pid={}\n", sys::own_pid()).as_bytes()),
        "say" => sys::write_all(1, format!("{}\n", words.text("text")).as_bytes()),
        "complain" => sys::write_all(2, format!("{}\n", words.text("text")).as_bytes()),
        "lines" => {
            let count = words.number("lines");
            let filler = "x".repeat(words.number("bytes") as usize);
            for index in 0..count {
                sys::write_all(1, format!("{} {index} {filler}\n", rank()).as_bytes());
            }
        }
        "numbered" => {
            let fd = words.number("descriptor") as i32;
            let count = words.number("lines");
            let bytes = words.number("bytes") as usize;
            let style = words.need("style");
            let style = Style::parse(style).unwrap_or_else(|| fail(&format!("unknown style {style:?}")));
            output::numbered(fd, &rank(), count, bytes, style);
        }
        "raw" => {
            let text = words
                .text("text")
                .replace("\\n", "\n")
                .replace("\\r", "\r")
                .replace("\\e", "\x1b");
            sys::write_all(1, text.as_bytes());
        }
        "flood" => {
            let mib = words.number("MiB");
            let line = words.number("bytes a line") as usize;
            output::flood(mib, line, words.number("bytes a write") as usize);
        }
        "trace" => sys::trace_to(append(&words.text("file")).into_raw_fd()),
        "touch" => replace(&words.text("file"), &sys::own_pid().to_string()),
        "stamp" => replace(&words.text("file"), &sys::monotonic_ns().to_string()),
        "dump" => replace(&words.text("file"), &dump::state()),
        "counts" => {
            let path = words.text("file");
            let counts = (1..=64).filter(|&signal| sys::caught(signal) > 0);
            let members: Vec<_> = counts
                .map(|signal| format!("\"{signal}\":{}", sys::caught(signal)))
                .collect();
            replace(&path, &format!("{{{}}}", members.join(",")));
        }
        "note" => {
            let mut file = append(&words.text("file"));
            let line = format!("{}\n", words.text("text"));
            let _ = file.write_all(line.as_bytes());
        }
        "wait" => {
            let path = words.text("file");
            while !Path::new(&path).exists() {
                family::sleep_us(1000);
            }
        }
        "waitpid" => wait_for_death(&words.text("file")),
        _ => return false,
    }
    true
}

fn append(path: &str) -> std::fs::File {
    let file = OpenOptions::new().append(true).create(true).open(path);
    file.unwrap_or_else(|error| fail(&format!("cannot open {path}: {error}")))
}

/// Writes a file so that a reader sees all of it or nothing.
fn replace(path: &str, text: &str) {
    let draft = format!("{path}.{}.draft", sys::own_pid());
    let written = std::fs::write(&draft, text).and_then(|()| std::fs::rename(&draft, path));
    if let Err(error) = written {
        fail(&format!("cannot write {path}: {error}"));
    }
}

fn wait_for_death(path: &str) {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let pid = text.trim().parse().ok().and_then(Pid::from_raw);
    let Some(pid) = pid else {
        fail(&format!("{path} holds no pid"))
    };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
        return;
    };
    let mut watched = [PollFd::new(&process, PollFlags::IN)];
    while poll(&mut watched, None).is_err() {}
}

fn processes(word: &str, words: &mut Words) -> bool {
    match word {
        "only" => {
            let ranks = words.need("ranks");
            let block = words.block();
            let (wanted, list) = ranks
                .strip_prefix('!')
                .map_or((true, ranks), |list| (false, list));
            if list.split(',').any(|one| one == rank()) == wanted {
                run(block);
            }
        }
        "child" | "daemon" | "threadchild" => {
            let block = words.block().to_vec();
            let child = move || run(&block);
            match word {
                "child" => family::child(child),
                "daemon" => family::daemon(child),
                _ => family::thread_child(child),
            }
        }
        "hop" => family::hop(words.number("generations"), words.number("microseconds")),
        "churn" => family::churn(words.number("children"), words.number("microseconds")),
        "bloom" => family::bloom(words.number("depth"), words.number("microseconds")),
        "vforkblock" => sys::vfork_and_block(),
        "exec" => {
            let error = sys::exec(words.0);
            fail(&format!("cannot execute {:?}: {error}", words.0.first()));
        }
        _ => return false,
    }
    true
}
