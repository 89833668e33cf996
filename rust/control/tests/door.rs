//! The ports of a head: agents get in, strangers do not, and the others do not notice.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use dsl_control::frame::{Frame, Ping};
use dsl_control::{
    Caller, ConnectError, Face, Hub, KEY_LEN, MAGIC, News, OPENING_LEN, PREAMBLE_LEN, Role, Session,
    Settings, Stream, connect,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const KEY: [u8; KEY_LEN] = [7; KEY_LEN];
const LONG: Duration = Duration::from_secs(20);
const STRANGE: &str = "has sent something that was not made with the key of this job";

fn hub(is_head: bool) -> Hub {
    let settings = Settings {
        heartbeat: LONG,
        console: is_head.then_some((1, 2)),
        taken: b"taken".to_vec(),
    };
    Hub::new(settings).unwrap()
}

/// A head that listens and expects an agent of place 7.
fn head() -> (Hub, u16) {
    let head = hub(true);
    let port = head.listen("", 0, None).unwrap();
    head.expect(Some(7), &KEY, 1);
    head.start().unwrap();
    (head, port)
}

/// The next news of a head, in short.
fn next(head: &Hub, count: usize) -> Vec<String> {
    let mut found = Vec::new();
    while found.len() < count {
        let timeout = Timespec {
            tv_sec: LONG.as_secs() as i64,
            tv_nsec: 0,
        };
        let ready = poll(&mut [PollFd::new(head, PollFlags::IN)], Some(&timeout));
        assert_eq!(ready, Ok(1), "only {found:?}");
        for news in head.read() {
            match news {
                News::Message(face, payload) => {
                    found.push(format!("{}: {}", face.place(), String::from_utf8_lossy(&payload)));
                }
                News::Gone(face, Some(loss)) => found.push(format!("{} {}", face.place(), loss.reason)),
                News::Gone(_, None) => {}
                News::Warning(text) | News::Lost(text) => found.push(text),
            }
        }
    }
    found
}

fn knock(port: u16) -> TcpStream {
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

fn is_refused(mut socket: &TcpStream) -> bool {
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn with_length(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u16).to_be_bytes(), message].concat()
}

/// What an agent sends first.
fn opening(place: u32) -> (Session, Vec<u8>) {
    let mut session = Session::new(&KEY, Role::Initiator).unwrap();
    let first = session.handshake().unwrap();
    let opening = [&MAGIC[..], &place.to_be_bytes(), &with_length(&first)].concat();
    assert_eq!(opening.len(), OPENING_LEN);
    (session, opening)
}

fn hear_answer(mut socket: &TcpStream, session: &mut Session) {
    let mut answer = [0; OPENING_LEN - PREAMBLE_LEN];
    socket.read_exact(&mut answer).unwrap();
    session.read_handshake(&answer[2..]).unwrap();
}

/// The handshake of an agent; returns its first bytes, too.
fn speak(port: u16, place: u32) -> (TcpStream, Session, Vec<u8>) {
    let mut socket = knock(port);
    let (mut session, opening) = opening(place);
    socket.write_all(&opening).unwrap();
    hear_answer(&socket, &mut session);
    (socket, session, opening)
}

fn sealed(session: &mut Session, plain: &[u8]) -> Vec<u8> {
    let mut message = vec![0; Session::sealed_len(plain.len()).unwrap()];
    session.seal(plain, &mut message).unwrap();
    with_length(&message)
}

fn said(session: &mut Session, text: &str) -> Vec<u8> {
    sealed(session, &Frame::Message(text.as_bytes()).to_bytes())
}

/// An agent by the front door, with its hub.
fn agent(port: u16, place: u32, text: &str) -> (Hub, Arc<Face>) {
    let caller = Caller {
        key: &KEY,
        place,
        keyed: false,
    };
    let stream = connect(&[format!("127.0.0.1:{port}")], caller, LONG, || false).unwrap();
    let agent = hub(false);
    let face = agent.add(Stream::Secure(Box::new(stream)), "the head".into());
    agent.send_now(&face, text.as_bytes(), LONG, || false).unwrap();
    (agent, face)
}

fn warning(socket: &TcpStream, port: u16) -> String {
    let from = socket.local_addr().unwrap();
    format!("a stranger at {from} connected to port {port} of this job and was refused")
}

#[test]
fn a_replay_of_what_an_agent_has_sent_is_refused() {
    let (head, port) = head();
    let (mut socket, mut session, opening) = speak(port, 7);
    let hello = said(&mut session, "hello");
    socket.write_all(&hello).unwrap();
    assert_eq!(next(&head, 1), ["7: hello"]);
    let mut stranger = knock(port);
    stranger.write_all(&[&opening[..], &hello].concat()).unwrap();
    assert!(is_refused(&stranger));
    assert_eq!(next(&head, 1), [warning(&stranger, port)]);
    socket.write_all(&said(&mut session, "more")).unwrap();
    assert_eq!(next(&head, 1), ["7: more"]);
    // The same message once more, on the agent's own connection.
    socket.write_all(&hello).unwrap();
    assert_eq!(next(&head, 1), [format!("7 {STRANGE}")]);
}

#[test]
fn bytes_that_were_changed_on_the_way_end_the_connection() {
    let flip = |data: &mut Vec<u8>| *data.last_mut().unwrap() ^= 1;
    let cut = |data: &mut Vec<u8>| {
        data.remove(2);
    };
    for damage in [&flip as &dyn Fn(&mut Vec<u8>), &cut] {
        let (head, port) = head();
        let (mut socket, mut session, _) = speak(port, 7);
        socket.write_all(&said(&mut session, "hello")).unwrap();
        assert_eq!(next(&head, 1), ["7: hello"]);
        let mut message = said(&mut session, "more");
        damage(&mut message);
        socket.write_all(&[&message[..], b"xx"].concat()).unwrap();
        assert_eq!(next(&head, 1), [format!("7 {STRANGE}")]);
    }
}

#[test]
fn an_agent_that_does_not_begin_with_a_short_message_is_a_stranger() {
    let starts = [
        Frame::Ping(Ping { sent: 1, real: 2 }).to_bytes(),
        Frame::Message(&vec![0; 65537]).to_bytes()[..100].to_vec(),
        b"\0\0\0\x01\x63x".to_vec(),
    ];
    for start in starts {
        let (head, port) = head();
        let (mut socket, mut session, _) = speak(port, 7);
        socket.write_all(&sealed(&mut session, &start)).unwrap();
        assert!(is_refused(&socket));
        assert_eq!(next(&head, 1), [warning(&socket, port)]);
    }
}

#[test]
fn a_flood_does_not_push_out_an_agent_that_has_begun_with_the_key() {
    let (head, port) = head();
    let (mut socket, mut session, opening) = speak(port, 7);
    let flood: Vec<TcpStream> = (0..200).map(|_| knock(port)).collect();
    assert!(is_refused(&flood[0]));
    // Few, because the agent has ten seconds, in which a busy machine computes few keys.
    let copies: Vec<TcpStream> = (0..2)
        .map(|_| {
            let mut copy = knock(port);
            copy.write_all(&opening).unwrap();
            copy.read_exact(&mut [0; OPENING_LEN - PREAMBLE_LEN]).unwrap();
            copy
        })
        .collect();
    socket.write_all(&said(&mut session, "hello")).unwrap();
    assert_eq!(next(&head, 2), [warning(&flood[0], port), "7: hello".into()]);
    drop(copies);
}

#[test]
fn an_agent_may_come_before_its_key() {
    comes_before_its_key(None);
}

#[test]
fn an_agent_that_is_started_again_may_come_before_its_new_key() {
    comes_before_its_key(Some([1; KEY_LEN]));
}

/// Lets an agent come before its key. `last`: the key of the agent that had its place before.
fn comes_before_its_key(last: Option<[u8; KEY_LEN]>) {
    let head = hub(true);
    let port = head.listen("", 0, None).unwrap();
    head.start().unwrap();
    if let Some(key) = last {
        head.expect(Some(7), &key, 1);
        head.expect(Some(7), &[], 1);
    }
    let mut socket = knock(port);
    let (mut session, opening) = opening(7);
    socket.write_all(&opening).unwrap();
    // One that speaks on before it is answered is no agent; by then the head has read the other's opening.
    let mut hasty = knock(port);
    hasty.write_all(&[&opening[..], b"x"].concat()).unwrap();
    assert!(is_refused(&hasty));
    head.expect(Some(7), &KEY, 1);
    hear_answer(&socket, &mut session);
    socket.write_all(&said(&mut session, "hello")).unwrap();
    assert_eq!(next(&head, 2), [warning(&hasty, port), "7: hello".into()]);
}

#[test]
fn nodes_with_and_without_a_key_of_their_user_are_told_what_does_not_fit() {
    let cases = [
        (
            false,
            KEY,
            true,
            "this node has a DSL_JOB_KEY, and the other side has none",
        ),
        (
            true,
            KEY,
            false,
            "this node has no DSL_JOB_KEY, and the other side has one",
        ),
        (
            false,
            [8; KEY_LEN],
            false,
            "the other side has another DSL_JOB_KEY or --rdzv-id",
        ),
    ];
    for (wants, key, has, why) in cases {
        let head = hub(true);
        let port = head.listen("", 0, Some(wants)).unwrap();
        head.expect(None, &KEY, 3);
        head.start().unwrap();
        let caller = Caller {
            key: &key,
            place: 1,
            keyed: has,
        };
        let refused = connect(&[format!("127.0.0.1:{port}")], caller, LONG, || false);
        match refused.map(drop) {
            Err(ConnectError::Refused(_, said)) => assert!(said.starts_with(why), "{said}"),
            other => panic!("{other:?}"),
        }
        let [warned] = &next(&head, 1)[..] else { panic!() };
        assert!(
            warned.starts_with("a node at 127.0.0.1 was refused: it has "),
            "{warned}"
        );
    }
}

#[test]
fn several_agents_may_come_for_a_place_where_they_come_by_themselves() {
    let head = hub(true);
    let port = head.listen("127.0.0.1", 0, Some(false)).unwrap();
    assert_eq!(head.listen("127.0.0.1", 0, Some(false)).unwrap(), port);
    head.expect(None, &KEY, 3);
    head.start().unwrap();
    let _one = agent(port, 1, "one");
    assert_eq!(next(&head, 1), ["1: one"]);
    let _other = agent(port, 1, "other");
    assert_eq!(next(&head, 1), ["1: other"]);
}

#[test]
fn an_agent_may_come_for_the_place_of_one_that_does_not_hang_up() {
    let (head, port) = head();
    let _old = agent(port, 7, "old");
    let old = loop {
        if let Some(News::Message(face, _)) = head.read().pop() {
            break face;
        }
        assert_eq!(poll(&mut [PollFd::new(&head, PollFlags::IN)], None), Ok(1));
    };
    head.close_link(&old);
    let _new = agent(port, 7, "new");
    assert_eq!(next(&head, 1), ["7: new"]);
}

#[test]
fn a_client_of_torch_s_store_is_told_from_other_strangers() {
    let head = hub(true);
    let port = head.listen("", 0, Some(false)).unwrap();
    head.start().unwrap();
    let mut socket = knock(port);
    socket.write_all(b"\x00\xce\xf7\x85\x3c").unwrap();
    assert!(is_refused(&socket));
    let expected = format!(
        "127.0.0.1 was sent away from port {port}, where the nodes meet: it is a torchrun, or a worker of torch"
    );
    assert_eq!(next(&head, 1), [expected]);
}

#[test]
fn a_port_that_is_closed_is_free_and_its_links_stay() {
    let (head, port) = head();
    let (agent, face) = agent(port, 7, "hello");
    assert_eq!(next(&head, 1), ["7: hello"]);
    head.unlisten(port);
    drop(std::net::TcpListener::bind(("127.0.0.1", port)).unwrap());
    agent.send_now(&face, b"more", LONG, || false).unwrap();
    assert_eq!(next(&head, 1), ["7: more"]);
}

#[test]
fn a_hub_that_was_not_started_gives_its_descriptors_away() {
    let head = hub(true);
    let port = head.listen("127.0.0.1", 0, None).unwrap();
    head.disown();
    drop(std::net::TcpListener::bind(("127.0.0.1", port)).unwrap());
    head.close(LONG, || false).unwrap();
}
