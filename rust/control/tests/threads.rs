//! Threads that send at the same time: no message is lost, and no thread sleeps while there is something for it.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::os::fd::{AsFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use dsl_control::{FdStream, Hub, News, Settings, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const THREADS: u32 = 4;
const EACH: u32 = 5_000;

fn hub(console: Option<(i32, i32)>) -> Hub {
    let settings = Settings {
        heartbeat: Duration::from_secs(20),
        console,
        taken: Vec::new(),
    };
    Hub::new(settings).unwrap()
}

fn by(end: UnixStream) -> Stream {
    let fd = end.into_raw_fd();
    Stream::Plain(FdStream::new(fd, fd).unwrap())
}

/// Whether there is something to read.
fn waits(hub: &Hub) -> bool {
    let timeout = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&hub.as_fd(), PollFlags::IN)], Some(&timeout)) == Ok(1)
}

#[test]
fn messages_of_many_threads_arrive_each_thread_s_in_order() {
    let (one, other) = UnixStream::pair().unwrap();
    let (head, agent) = (hub(Some((1, 2))), hub(None));
    let _on_head = head.add(by(one), "agent".into());
    let face = agent.add(by(other), "head".into());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (agent, face) = (&agent, &face);
            scope.spawn(move || {
                for number in 0..EACH {
                    let words = [thread.to_be_bytes(), number.to_be_bytes()].concat();
                    agent.send(face, &words);
                }
            });
        }
        // They begin to send before anybody serves.
        agent.start().unwrap();
        head.start().unwrap();
        let mut next = [0; THREADS as usize];
        while next != [EACH; THREADS as usize] {
            assert!(waits(&head), "only {next:?}");
            for news in head.read() {
                let News::Message(_, words) = news else {
                    panic!("{news:?}")
                };
                let (thread, number) = words.split_first_chunk::<4>().unwrap();
                let place = &mut next[u32::from_be_bytes(*thread) as usize];
                assert_eq!(number, place.to_be_bytes());
                *place += 1;
            }
        }
    });
}

#[test]
fn a_hub_closes_while_others_send() {
    for _ in 0..50 {
        let (one, other) = UnixStream::pair().unwrap();
        let (head, agent) = (hub(Some((1, 2))), hub(None));
        let _on_head = head.add(by(one), "agent".into());
        let face = agent.add(by(other), "head".into());
        agent.start().unwrap();
        head.start().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !face.is_lost() {
                    agent.send(&face, b"word");
                }
            });
            assert!(waits(&head));
            // Longer than the head waits for the end.
            scope.spawn(|| agent.close(Duration::from_secs(60), || false).unwrap());
            let is_end = |news: &News| matches!(news, News::Gone(..));
            while !head.read().iter().any(is_end) {
                assert!(waits(&head));
            }
        });
    }
}
