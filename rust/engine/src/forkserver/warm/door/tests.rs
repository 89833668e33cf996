use super::*;

#[test]
fn a_caller_that_is_gone_is_known_and_what_one_that_stays_has_said_is_kept() {
    let (ours, theirs) = socket::pair().unwrap();
    let call = Call {
        connections: VecDeque::from([ours]),
        file: socket::pack(c"test", b"").unwrap(),
        request: Request::new(Purpose::Serve),
        command: own_pid(),
        job: 0,
        release: None,
        handed_over: None,
    };
    assert!(!call.is_gone());
    socket::send(&theirs, b"expect", &[], false).unwrap();
    assert!(!call.is_gone());
    let heard = socket::receive(&call.connections[0]).unwrap();
    assert_eq!(heard.unwrap().0, b"expect");
    drop(theirs);
    assert!(call.is_gone());
}
