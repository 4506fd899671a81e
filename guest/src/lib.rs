//! The guest agent and its protocol, both ends.
