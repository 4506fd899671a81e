use super::*;
use std::sync::Arc;

fn part(bytes: &[u8]) -> Part {
    let file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut &file, bytes).unwrap();
    Part::new(Arc::new(file), 0, bytes.len() as u64)
}

fn layer(bytes: &[u8]) -> Layer {
    Layer::of("layer".to_owned(), part(bytes), Digest::of(bytes))
}

#[test]
fn layers_come_in_chunks_and_with_an_end() {
    let mut read = 0;
    let mut count = |bytes| read += bytes;
    let mut stream = LayerStream::new(vec![layer(b"abc"), layer(b""), layer(&[b'x'; 70_000])], &mut count);
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    assert_eq!(&bytes[..15], b"\x03\0\0\0abc\0\0\0\0\0\0\0\0");
    assert_eq!(&bytes[15..19], 65_536_u32.to_le_bytes());
    assert_eq!(&bytes[bytes.len() - 8..], b"\0\0\0\0\xff\xff\xff\xff");
    assert_eq!(stream.read(&mut [0; 10]).unwrap(), 0);
    assert_eq!(stream.digest(), Some(&Digest::of(&[b'x'; 70_000])));
    assert_eq!(read, 70_003);
}

#[test]
fn a_layer_that_is_not_what_it_should_be_has_no_end() {
    let wrong = Layer::of("blob".to_owned(), part(b"abc"), Digest::of(b"abd"));
    let mut ignore = |_| ();
    let mut stream = LayerStream::new(vec![wrong], &mut ignore);
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap_err();
    assert_eq!(bytes, b"\x03\0\0\0abc", "no end of the layer, none of the image");
    let error = stream.take_error().unwrap().to_string();
    assert!(error.starts_with("blob: its digest is sha256:") && error.contains("damaged"), "{error}");
    assert_eq!(stream.digest(), None);
}

#[test]
fn a_file_that_shrinks_is_noticed() {
    let file = Arc::new(tempfile::tempfile().unwrap());
    let part = Part::new(Arc::clone(&file), 0, 100);
    let mut ignore = |_| ();
    let mut stream = LayerStream::new(vec![Layer::of("l".to_owned(), part, Digest::of(b""))], &mut ignore);
    assert!(stream.read_to_end(&mut Vec::new()).unwrap_err().to_string().contains("shorter"));
}

#[test]
fn a_pipe_gives_what_was_read_ahead_first() {
    let (from, to) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&to, b"tail").unwrap();
    drop(to);
    let mut ignore = |_| ();
    let layer = Layer::pipe("-".to_owned(), b"head".to_vec(), from.into());
    assert_eq!(layer.length(), None);
    let mut stream = LayerStream::new(vec![layer], &mut ignore);
    stream.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(stream.digest(), Some(&Digest::of(b"headtail")));
}
