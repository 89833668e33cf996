use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// A frame that owns its bytes.
fn owned() -> impl Strategy<Value = Vec<u8>> {
    let data = vec(any::<u8>(), 0..300);
    let number = any::<u64>();
    let console = prop_oneof![Just(Console::Stdout), Just(Console::Stderr)];
    prop_oneof![
        data.clone().prop_map(|data| Frame::Message(&data).to_bytes()),
        (number, number).prop_map(|(sent, real)| Frame::Ping(Ping { sent, real }).to_bytes()),
        (number, number, number, number).prop_map(|(sent, real, heard, now)| {
            let ping = Ping { sent, real };
            Frame::Pong(Pong { ping, heard, now }).to_bytes()
        }),
        (console, data, any::<bool>()).prop_map(|(console, data, goes_on)| {
            let data = &data[..];
            Frame::Output {
                console,
                data,
                goes_on,
            }
            .to_bytes()
        }),
        number.prop_map(|count| Frame::Credit(count).to_bytes()),
        vec(any::<u8>(), 0..300).prop_map(|data| Frame::Packed(&data).to_bytes()),
    ]
}

/// Feeds pieces; returns the frames as bytes, and the error if there was one.
fn fed<'data>(
    parser: &mut Parser,
    pieces: impl IntoIterator<Item = &'data [u8]>,
) -> (Vec<Vec<u8>>, Option<Damaged>) {
    let mut found = Vec::new();
    for piece in pieces {
        let result: Result<(), Damaged> = parser.feed(piece, |frame| {
            found.push(frame.to_bytes());
            Ok(())
        });
        if let Err(damaged) = result {
            return (found, Some(damaged));
        }
    }
    (found, None)
}

/// Cuts bytes at places.
fn cut(data: &[u8], places: &[usize]) -> Vec<Vec<u8>> {
    let mut edges: Vec<usize> = places.iter().map(|place| place % (data.len() + 1)).collect();
    edges.extend([0, data.len()]);
    edges.sort_unstable();
    edges
        .windows(2)
        .map(|edge| data[edge[0]..edge[1]].to_vec())
        .collect()
}

/// Whatever comes, in whatever pieces: the same frames and the same error as at once, and bounded memory.
fn holds_for_any_bytes(data: &[u8], places: &[usize], longest: usize) {
    let whole = fed(&mut Parser::new(longest), [data]);
    let mut parser = Parser::new(longest);
    let pieces = cut(data, places);
    let found = fed(&mut parser, pieces.iter().map(Vec::as_slice));
    assert_eq!(found, whole);
    if found.1.is_none() {
        assert!(parser.held.len() < longest + HEAD_LEN);
        let read: usize = found.0.iter().map(Vec::len).sum();
        assert_eq!(read + parser.held.len(), data.len());
    }
}

/// Bytes that look like frames, so that more than the first check is reached.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let headed = (0u32..200, 0u8..7, vec(any::<u8>(), 0..120))
        .prop_map(|(length, kind, payload)| [&length.to_be_bytes()[..], &[kind], &payload].concat());
    prop_oneof![
        vec(any::<u8>(), 0..300),
        vec(headed, 0..6).prop_map(|parts| parts.concat()),
        (vec(owned(), 0..6), any::<usize>(), any::<u8>()).prop_map(|(frames, at, byte)| {
            let mut data = frames.concat();
            let length = data.len().max(1);
            if let Some(place) = data.get_mut(at % length) {
                *place = byte;
            }
            data
        }),
    ]
}

proptest! {
    #[test]
    fn frames_come_out_as_they_went_in(
        frames in vec(owned(), 0..8),
        places in vec(any::<usize>(), 0..10),
    ) {
        let mut parser = Parser::new(LONGEST);
        let data = frames.concat();
        let pieces = cut(&data, &places);
        let found = fed(&mut parser, pieces.iter().map(Vec::as_slice));
        prop_assert_eq!(found, (frames, None));
        prop_assert_eq!(parser.held.len(), 0);
    }

    #[test]
    fn any_bytes_in_any_pieces_give_the_same_frames(
        data in hostile(),
        places in vec(any::<usize>(), 0..10),
        longest in 0usize..150,
    ) {
        holds_for_any_bytes(&data, &places, longest);
    }
}

/// Ten million inputs; minutes, so only `make fuzz` runs it.
#[test]
#[ignore = "takes minutes"]
fn ten_million_inputs_do_no_harm() {
    use proptest::test_runner::{Config, TestRunner};
    let config = Config {
        cases: 10_000_000,
        failure_persistence: None,
        ..Config::default()
    };
    let inputs = (hostile(), vec(any::<usize>(), 0..10), 0usize..150);
    let result = TestRunner::new(config).run(&inputs, |(data, places, longest)| {
        holds_for_any_bytes(&data, &places, longest);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn a_frame_that_is_too_long_is_refused_by_its_head_alone() {
    let fits = Frame::Message(&[0; 10]).to_bytes();
    let too_long = Frame::Message(&[0; 11]).to_bytes();
    let mut parser = Parser::new(10);
    let (found, damaged) = fed(&mut parser, [&fits[..], &too_long[..5]]);
    assert_eq!(found, [fits]);
    let expected = "has sent a message of 11 bytes, more than the 10 allowed";
    assert_eq!(damaged, Some(Damaged(expected.into())));
    assert_eq!(
        fed(&mut Parser::new(11), [&too_long[..]]),
        (vec![too_long.clone()], None)
    );
}

#[test]
fn what_is_no_frame_is_refused() {
    let refused = |kind: u8, payload: &[u8]| {
        let head = (payload.len() as u32).to_be_bytes();
        let data = [&head[..], &[kind], payload].concat();
        fed(&mut Parser::new(LONGEST), [&data[..]]).1.unwrap().0
    };
    assert_eq!(refused(99, b""), "has sent a message of an unknown kind (99)");
    for payload in [&b""[..], b"\0rest", b"\x03rest"] {
        assert_eq!(refused(OUTPUT, payload), "has sent output of an unknown stream");
    }
    for kind in [PING, PONG, CREDIT] {
        for payload in [&b""[..], b"xxxxxxx", b"xxxxxxxxx"] {
            assert_eq!(refused(kind, payload), "has sent a damaged message");
        }
    }
}

#[test]
fn a_buffer_that_was_needed_once_is_not_kept() {
    let mut parser = Parser::new(LONGEST);
    let data = Frame::Message(&vec![0; 1 << 20]).to_bytes();
    let (begin, end) = data.split_at(1 << 19);
    let (found, damaged) = fed(&mut parser, [begin, end]);
    assert_eq!((found.len(), damaged), (1, None));
    assert_eq!(parser.held.capacity(), 0);
}

#[test]
fn packed_output_holds_whole_frames_of_output() {
    let output = Frame::Output {
        console: Console::Stdout,
        data: b"one\n",
        goes_on: false,
    }
    .to_bytes();
    let count = |frames: &[u8]| {
        let mut count = 0;
        let result: Result<(), Damaged> = each_unpacked(frames, |_| {
            count += 1;
            Ok(())
        });
        result.map(|()| count)
    };
    assert_eq!(count(&[&output[..], &output[..]].concat()), Ok(2));
    let refused = Err(Damaged("has sent damaged output".into()));
    assert_eq!(count(&output[..output.len() - 1]), refused);
    for other in [Frame::Message(b"one"), Frame::Credit(1), Frame::Packed(&output)] {
        assert_eq!(count(&other.to_bytes()), refused);
    }
}
