//! HTTP/1 in the clear: every request head on a connection is read strictly, checked and written anew.
//!
//! Nothing is passed on as it came. One request is outstanding at a time: the next is read when the answer to the one
//! before is through, so an answer can never be taken for another request's.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

pub mod body;
pub mod head;

use netfilter_control::{Name, Reason, Terms};

use body::Body;
use head::{Answer, Framing, MAX_HEAD, Refusal, Request};

/// Bytes that wait for one side before the other is read no more.
pub const MAX_WAITING: usize = 64 << 10;
/// Most interim answers (1xx) to one request.
const MAX_INTERIM: u32 = 16;

/// What happened to one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happening {
    /// It was answered.
    Answered {
        /// Its method.
        method: String,
        /// Its path.
        path: String,
        /// The answer's status.
        status: u16,
    },
    /// It was refused.
    Refused(Refusal),
    /// The answer was not strictly framed.
    BadAnswer,
}

/// How a connection goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Course {
    /// As HTTP.
    Open,
    /// As an opaque pipe: a websocket.
    Tunnel,
    /// It ends when what waits for the guest has been sent.
    Closing,
    /// It ends now, with a reset: the guest must not take what it has for a whole answer.
    Broken,
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    name: Name,
    port: u16,
    terms: Terms,
    /// The part of a head that is there, from either side.
    request_head: Vec<u8>,
    answer_head: Vec<u8>,
    exchange: Option<Exchange>,
    to_guest: Vec<u8>,
    to_upstream: Vec<u8>,
    happenings: Vec<Happening>,
    course: Course,
}

/// A request that is not fully answered.
#[derive(Debug)]
struct Exchange {
    request: Request,
    request_body: Body,
    answer: Option<(Answer, Body)>,
    interim: u32,
}

impl Connection {
    /// A connection to a host, by a rule.
    pub fn new(name: Name, port: u16, terms: Terms) -> Self {
        Self {
            name,
            port,
            terms,
            request_head: Vec::new(),
            answer_head: Vec::new(),
            exchange: None,
            to_guest: Vec::new(),
            to_upstream: Vec::new(),
            happenings: Vec::new(),
            course: Course::Open,
        }
    }

    /// How it goes on.
    pub fn course(&self) -> Course {
        self.course
    }

    /// Whether part of a request's head is there, and the rest should come soon.
    pub fn in_head(&self) -> bool {
        !self.request_head.is_empty()
    }

    /// Whether no request is outstanding, nor part of one.
    pub fn is_idle(&self) -> bool {
        self.exchange.is_none() && self.request_head.is_empty()
    }

    /// What waits for the guest. What was sent is taken from its front.
    pub fn to_guest(&mut self) -> &mut Vec<u8> {
        &mut self.to_guest
    }

    /// What waits for the other side.
    pub fn to_upstream(&mut self) -> &mut Vec<u8> {
        &mut self.to_upstream
    }

    /// What happened since it was last asked.
    pub fn happenings(&mut self) -> Vec<Happening> {
        std::mem::take(&mut self.happenings)
    }

    /// Takes bytes from the guest, and says how many it took. The rest stays where it is.
    pub fn from_guest(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0usize;
        while self.course == Course::Open && self.to_upstream.len() < MAX_WAITING {
            let rest = bytes.get(taken..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            let step = match &mut self.exchange {
                None => self.read_request_head(rest),
                Some(exchange) if exchange.request_body.is_done() => break,
                Some(exchange) => {
                    // No more than fits is looked at, so that what waits stays bounded.
                    let piece = rest.get(..rest.len().min(MAX_WAITING)).unwrap_or_default();
                    match exchange.request_body.read(piece, &mut self.to_upstream) {
                        Ok(count) => count,
                        Err(body::Broken) => {
                            self.refuse(Refusal {
                                status: 400,
                                reason: Reason::BadHttp,
                                text: "the body is not framed as it was announced".to_owned(),
                            });
                            break;
                        }
                    }
                }
            };
            taken = taken.saturating_add(step);
        }
        taken
    }

    fn read_request_head(&mut self, bytes: &[u8]) -> usize {
        let (count, found) = gather(&mut self.request_head, bytes);
        match found {
            Gathered::More => {}
            Gathered::Whole => {
                let head = std::mem::take(&mut self.request_head);
                match head::request(&head, &self.name, self.port, &self.terms) {
                    Ok(request) => {
                        self.to_upstream.extend_from_slice(&request.head);
                        let request_body = Body::new(request.framing);
                        self.exchange = Some(Exchange { request, request_body, answer: None, interim: 0 });
                    }
                    Err(refusal) => self.refuse(refusal),
                }
            }
            Gathered::Broken(status, text) => {
                self.refuse(Refusal { status, reason: Reason::BadHttp, text: text.to_owned() });
            }
        }
        count
    }

    /// Answers the guest itself, and ends the connection. Where an answer has begun there is no room for another.
    fn refuse(&mut self, refusal: Refusal) {
        if self.exchange.as_ref().is_some_and(|exchange| exchange.answer.is_some()) {
            self.course = Course::Broken;
        } else {
            let text = format!("denied by sandbox policy: {}\n", refusal.text);
            let phrase = match refusal.status {
                400 => "Bad Request",
                414 => "URI Too Long",
                417 => "Expectation Failed",
                421 => "Misdirected Request",
                431 => "Request Header Fields Too Large",
                _ => "Forbidden",
            };
            let head = format!(
                "HTTP/1.1 {} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                refusal.status,
                text.len()
            );
            self.to_guest.extend_from_slice(head.as_bytes());
            self.to_guest.extend_from_slice(text.as_bytes());
            self.course = Course::Closing;
        }
        self.to_upstream.clear();
        self.happenings.push(Happening::Refused(refusal));
    }

    /// Takes bytes from the other side, and says how many it took.
    pub fn from_upstream(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0usize;
        while self.course == Course::Open && self.to_guest.len() < MAX_WAITING {
            let rest = bytes.get(taken..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            let step = match &mut self.exchange {
                // Nothing was asked: whatever this is, it must not become the answer to what is asked next.
                None => None,
                Some(exchange) => match &mut exchange.answer {
                    None => self.read_answer_head(rest),
                    Some((_, body)) => {
                        let piece = rest.get(..rest.len().min(MAX_WAITING)).unwrap_or_default();
                        body.read(piece, &mut self.to_guest).ok()
                    }
                },
            };
            let Some(step) = step else {
                self.bad_answer();
                break;
            };
            taken = taken.saturating_add(step);
            self.finish_exchange();
        }
        taken
    }

    fn read_answer_head(&mut self, bytes: &[u8]) -> Option<usize> {
        let exchange = self.exchange.as_mut()?;
        let (count, found) = gather(&mut self.answer_head, bytes);
        match found {
            Gathered::More => return Some(count),
            Gathered::Broken(..) => return None,
            Gathered::Whole => {}
        }
        let head = std::mem::take(&mut self.answer_head);
        let mut answer = head::answer(&head, &exchange.request.method)?;
        match answer.status {
            101 if exchange.request.websocket => {
                self.to_guest.extend_from_slice(&answer.head);
                self.to_guest.extend_from_slice(b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
                self.course = Course::Tunnel;
                self.happened(101);
                return Some(count);
            }
            101 => return None,
            100..200 => {
                exchange.interim = exchange.interim.saturating_add(1);
                if exchange.interim > MAX_INTERIM {
                    return None;
                }
                if !exchange.request.old {
                    self.to_guest.extend_from_slice(&answer.head);
                    self.to_guest.extend_from_slice(b"\r\n");
                }
                return Some(count);
            }
            _ => {}
        }
        // An old client cannot read chunks, and there is no other way to frame what has no length.
        if exchange.request.old && answer.framing == Framing::Chunked {
            return None;
        }
        // An answer before the end of the request leaves the rest of the request without a place.
        answer.close |= exchange.request.close || !exchange.request_body.is_done();
        self.to_guest.extend_from_slice(&answer.head);
        self.to_guest.extend_from_slice(if answer.close { b"Connection: close\r\n\r\n" } else { b"\r\n" });
        let body = Body::new(answer.framing);
        let status = answer.status;
        exchange.answer = Some((answer, body));
        self.happened(status);
        Some(count)
    }

    fn happened(&mut self, status: u16) {
        if let Some(exchange) = &self.exchange {
            let (method, path) = (exchange.request.method.clone(), exchange.request.path.clone());
            self.happenings.push(Happening::Answered { method, path, status });
        }
    }

    /// Makes room for the next request when the answer is through.
    fn finish_exchange(&mut self) {
        let done =
            self.exchange.as_ref().and_then(|exchange| exchange.answer.as_ref()).filter(|(_, body)| body.is_done());
        if let Some((answer, _)) = done {
            if answer.close {
                self.course = Course::Closing;
            } else {
                self.exchange = None;
            }
        }
    }

    fn bad_answer(&mut self) {
        self.happenings.push(Happening::BadAnswer);
        self.course = Course::Broken;
    }

    /// The other side will send no more.
    pub fn upstream_ended(&mut self) {
        if self.course != Course::Open {
            return;
        }
        let whole = match &self.exchange {
            // Between two requests: a server may close whenever it likes.
            None => true,
            Some(Exchange { answer: Some((_, body)), .. }) => body.may_end(),
            Some(_) => false,
        };
        self.course = if whole { Course::Closing } else { Course::Broken };
    }
}

enum Gathered {
    More,
    Whole,
    Broken(u16, &'static str),
}

/// Adds bytes to a head until its empty line. Says how many it took.
fn gather(head: &mut Vec<u8>, bytes: &[u8]) -> (usize, Gathered) {
    for (count, byte) in (1usize..).zip(bytes) {
        let returned = head.last() == Some(&b'\r');
        if (*byte == b'\n') != returned {
            return (count, Gathered::Broken(400, "a line does not end in CR LF"));
        }
        head.push(*byte);
        if head.ends_with(b"\r\n\r\n") {
            return (count, Gathered::Whole);
        }
        if head.as_slice() == b"\r\n" {
            return (count, Gathered::Broken(400, "an empty line before the message"));
        }
        if head.len() >= MAX_HEAD {
            return (count, Gathered::Broken(431, "a head of over 32 KiB"));
        }
    }
    (bytes.len(), Gathered::More)
}
