use super::*;
use proptest::prelude::*;

const KEY: [u8; KEY_LEN] = [7; KEY_LEN];

fn session(role: Role) -> Session {
    Session::new(&KEY, role).expect("a key of the right length")
}

fn pair() -> (Session, Session) {
    let (mut one, mut other) = (session(Role::Initiator), session(Role::Responder));
    other
        .read_handshake(&one.handshake().expect("the initiator begins"))
        .expect("the same key");
    one.read_handshake(&other.handshake().expect("an answer"))
        .expect("the same key");
    (one, other)
}

fn seal(session: &mut Session, plain: &[u8]) -> Vec<u8> {
    let mut message = vec![0; Session::sealed_len(plain.len()).expect("not too long")];
    session.seal(plain, &mut message).expect("a ready session");
    message
}

fn open(session: &mut Session, message: &[u8]) -> Result<Vec<u8>, Error> {
    let mut plain = vec![0; Session::opened_len(message.len())];
    session.open(message, &mut plain).map(|()| plain)
}

#[test]
fn both_sides_read_each_other() {
    let (mut one, mut other) = pair();
    assert!(one.is_ready() && other.is_ready());
    let longest = vec![0; MAX_PLAIN];
    for text in [b"".as_slice(), b"a", &longest] {
        let message = seal(&mut one, text);
        assert_eq!(open(&mut other, &message).as_deref(), Ok(text));
        let answer = seal(&mut other, text);
        assert_eq!(open(&mut one, &answer).as_deref(), Ok(text));
    }
}

#[test]
fn no_two_messages_are_alike_and_none_shows_what_it_holds() {
    let (mut one, _) = pair();
    let (first, second) = (seal(&mut one, b"secret text"), seal(&mut one, b"secret text"));
    assert_ne!(first, second);
    assert!(!first.windows(6).any(|part| part == b"secret"));
}

#[test]
fn a_key_has_thirty_two_bytes() {
    for length in [0, 31, 33] {
        let error = Session::new(&vec![0; length], Role::Initiator).err();
        assert_eq!(error, Some(Error::KeyLength(length)));
    }
}

#[test]
fn a_stranger_is_refused_by_its_first_message() {
    let mut stranger = Session::new(&[8; KEY_LEN], Role::Initiator).expect("a key");
    let mut other = session(Role::Responder);
    let message = stranger.handshake().expect("the initiator begins");
    assert_eq!(other.read_handshake(&message), Err(Error::Handshake));
    assert_eq!(other.handshake(), Err(Error::Broken));
    assert!(!other.is_ready());
}

#[test]
fn who_only_repeats_what_it_saw_gets_no_session() {
    let (mut one, mut other) = (session(Role::Initiator), session(Role::Responder));
    let seen = one.handshake().expect("the initiator begins");
    other.read_handshake(&seen).expect("the same key");
    let answer = other.handshake().expect("an answer");
    one.read_handshake(&answer).expect("the same key");
    let order = seal(&mut one, b"stop");

    let mut again = session(Role::Responder);
    again
        .read_handshake(&seen)
        .expect("the first message is as it was");
    again.handshake().expect("an answer of its own");
    assert_eq!(open(&mut again, &order), Err(Error::Damaged));
}

#[test]
fn another_protocol_is_refused() {
    let mut foreign = Builder::new(PATTERN.parse().expect("a pattern"))
        .prologue(b"dsl control 2")
        .and_then(|builder| builder.psk(0, &KEY))
        .and_then(Builder::build_initiator)
        .expect("a session");
    let mut message = [0; HANDSHAKE_LEN];
    foreign
        .write_message(&[], &mut message)
        .expect("the initiator begins");
    assert_eq!(
        session(Role::Responder).read_handshake(&message),
        Err(Error::Handshake)
    );
}

#[test]
fn a_handshake_that_brings_more_is_refused() {
    let mut foreign = Builder::new(PATTERN.parse().expect("a pattern"))
        .prologue(PROLOGUE)
        .and_then(|builder| builder.psk(0, &KEY))
        .and_then(Builder::build_initiator)
        .expect("a session");
    let mut message = [0; HANDSHAKE_LEN + 5];
    foreign
        .write_message(b"extra", &mut message)
        .expect("the initiator begins");
    assert_eq!(
        session(Role::Responder).read_handshake(&message),
        Err(Error::Handshake)
    );
}

#[test]
fn a_message_of_our_own_is_not_the_other_side_s() {
    let (mut one, _) = pair();
    let message = seal(&mut one, b"order");
    assert_eq!(open(&mut one, &message), Err(Error::Damaged));
}

#[test]
fn a_repeated_message_ends_the_session() {
    let (mut one, mut other) = pair();
    let message = seal(&mut one, b"order");
    assert!(open(&mut other, &message).is_ok());
    assert_eq!(open(&mut other, &message), Err(Error::Damaged));
    let next = seal(&mut one, b"next");
    assert_eq!(open(&mut other, &next), Err(Error::Broken));
    assert_eq!(other.seal(b"", &mut [0; TAG_LEN]), Err(Error::Broken));
    assert!(!other.is_ready());
}

#[test]
fn messages_in_another_order_are_refused() {
    let (mut one, mut other) = pair();
    let _first = seal(&mut one, b"first");
    let second = seal(&mut one, b"second");
    assert_eq!(open(&mut other, &second), Err(Error::Damaged));
}

#[test]
fn a_flipped_bit_in_any_byte_and_every_cut_is_noticed() {
    let length = Session::sealed_len(5).expect("short");
    for byte in 0..length {
        let (mut one, mut other) = pair();
        let mut message = seal(&mut one, b"order");
        message[byte] ^= 1 << (byte % 8);
        assert_eq!(open(&mut other, &message), Err(Error::Damaged), "byte {byte}");
    }
    for kept in 0..length {
        let (mut one, mut other) = pair();
        let message = seal(&mut one, b"order");
        assert_eq!(
            open(&mut other, &message[..kept]),
            Err(Error::Damaged),
            "{kept} bytes"
        );
    }
}

#[test]
fn a_call_out_of_order_fails_and_changes_nothing() {
    let (mut one, mut other) = (session(Role::Initiator), session(Role::Responder));
    assert_eq!(other.handshake(), Err(Error::TheirTurn));
    assert_eq!(one.read_handshake(&[0; HANDSHAKE_LEN]), Err(Error::OurTurn));
    assert_eq!(one.seal(b"", &mut [0; TAG_LEN]), Err(Error::NotReady));
    assert_eq!(open(&mut one, &[0; TAG_LEN]), Err(Error::NotReady));
    other
        .read_handshake(&one.handshake().expect("its turn"))
        .expect("the same key");
    assert_eq!(one.handshake(), Err(Error::TheirTurn));
    one.read_handshake(&other.handshake().expect("its turn"))
        .expect("the same key");
    assert_eq!(one.handshake(), Err(Error::AlreadyReady));
    assert_eq!(one.read_handshake(b""), Err(Error::AlreadyReady));
    let long = vec![0; MAX_PLAIN + 1];
    assert_eq!(one.seal(&long, &mut []), Err(Error::TooLong(MAX_PLAIN + 1)));
    let message = seal(&mut one, b"order");
    assert_eq!(open(&mut other, &message).as_deref(), Ok(b"order".as_slice()));
}

#[test]
fn a_message_longer_than_the_protocol_allows_is_refused() {
    let (_, mut other) = pair();
    assert_eq!(open(&mut other, &vec![0; MAX_MESSAGE + 1]), Err(Error::Damaged));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))] // a handshake takes 20 ms without optimisation

    #[test]
    fn any_bytes_in_place_of_a_message_are_an_error_and_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert_eq!(session(Role::Responder).read_handshake(&bytes), Err(Error::Handshake));
        let (mut one, _) = pair();
        prop_assert_eq!(open(&mut one, &bytes), Err(Error::Damaged));
    }
}
