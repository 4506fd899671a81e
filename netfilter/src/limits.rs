//! Every limit of a run's network, in one place.

use std::time::Duration;

/// Frames a second from the guest; what is more is dropped, as a slow link would.
pub const FRAMES_A_SECOND: u64 = 50_000;
/// Most frames at once.
pub const FRAME_BURST: u64 = 50_000;
/// DNS questions a second.
pub const QUESTIONS_A_SECOND: u64 = 50;
/// Most questions at once.
pub const QUESTION_BURST: u64 = 200;
/// Answers a second to each of echo, DHCP, ARP and unreachable ports.
pub const LOCAL_ANSWERS_A_SECOND: u64 = 10;
/// Most such answers at once.
pub const LOCAL_BURST: u64 = 20;

/// Most flows at a time.
pub const FLOWS: usize = 256;
/// Most flows whose destination is not reached yet: a hundred connections that a program opens at once, and some.
pub const PENDING: usize = 128;
/// New flows a second.
pub const FLOWS_A_SECOND: u64 = 20;
/// Most new flows at once: a browser or a package manager opens dozens.
pub const FLOW_BURST: u64 = 128;
/// Dials that may fail in a minute before new ones are refused until the minute is over: a scanner's pattern.
pub const FAILED_DIALS_A_MINUTE: u64 = 100;

/// How long a TLS hello may take, from the first byte that could have been sent.
pub const HELLO: Duration = Duration::from_secs(10);
/// How long the first line of SSH may take, and a head of HTTP from its first byte.
pub const HEAD: Duration = Duration::from_secs(10);
/// How long nothing may be said on an HTTP connection.
pub const HTTP_IDLE: Duration = Duration::from_secs(300);
/// How long nothing may be said on another.
pub const IDLE: Duration = Duration::from_secs(3600);
/// How long nothing may be said when one direction has ended.
pub const HALF_CLOSED: Duration = Duration::from_secs(120);
/// How long one side may leave what the other sent untouched.
pub const STALL: Duration = Duration::from_secs(60);
/// How long a connection that has been answered may take to end.
pub const LINGER: Duration = Duration::from_secs(10);
