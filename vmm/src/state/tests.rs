use proptest::prelude::*;
use vmm_control::{Disk, Net};

use super::*;
use crate::state::vcpu::MSRS_OF_TESTS as MSRS;

fn config() -> Config {
    let disk = |read_only| Disk { serial: String::new(), read_only, raw_base: true, layers: 2, queues: 3 };
    Config {
        vcpus: 2,
        memory: 64 << 20,
        cmdline: String::new(),
        initrds: 0,
        disks: vec![disk(false), disk(true)],
        console: true,
        net: Some(Net { mac: [2, 0, 0, 0, 0, 2] }),
    }
}

fn state() -> MachineState {
    let queue = QueueState {
        max_size: 256,
        size: 128,
        ready: true,
        next_avail: 77,
        next_used: 78,
        desc_table: 0x1000,
        avail_ring: 0x2000,
        used_ring: 0x3000,
        event_idx_enabled: false,
    };
    let transport = TransportState {
        status: 15,
        device_features_sel: 1,
        driver_features_sel: 2,
        driver_features: 1 << 32,
        queue_sel: 3,
        queues: vec![queue; 3],
        served: 5,
    };
    MachineState {
        facts: Facts::of(&config(), &[4096, 8192]),
        vcpus: (0..2).map(|_| VcpuState::of_tests()).collect(),
        chips: (0..CHIPS).map(|chip_id| kvm_irqchip { chip_id, ..Default::default() }).collect(),
        clock: Stopped { clock: 12_345, counters: vec![6, 7] },
        devices: (1..4).map(|id| DeviceState { id, transport: transport.clone() }).collect(),
        vsock: VsockState { next_host_port: 4711, reset_owed: true },
        serial: Some([1, 2, 3, 4, 5, 6]),
    }
}

fn parse(bytes: &[u8]) -> StateError {
    MachineState::from_bytes(bytes).map(drop).unwrap_err()
}

#[test]
fn what_was_written_is_read() {
    let bytes = state().to_bytes();
    let again = MachineState::from_bytes(&bytes).unwrap();
    assert_eq!(again.to_bytes(), bytes);
    assert_eq!((again.facts, again.devices), (state().facts, state().devices));
    assert_eq!((again.clock, again.vsock, again.serial), (state().clock, state().vsock, state().serial));
    assert_eq!(again.vcpus.first().map(|vcpu| vcpu.msrs.clone()), Some(MSRS.to_vec()));
}

#[test]
fn what_is_no_state_is_named() {
    let bytes = state().to_bytes();
    assert!(matches!(parse(b""), StateError::Magic));
    assert!(matches!(parse(&[b'x'; 100]), StateError::Magic));
    assert!(matches!(parse(&vec![0; (1 << 20) + 1]), StateError::TooLarge(_)));
    let mut newer = bytes.clone();
    newer[8] = 2;
    assert!(matches!(parse(&newer), StateError::Version(2)));
    for length in 16..bytes.len() {
        assert!(matches!(parse(&bytes[..length]), StateError::Length { .. }), "{length}");
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert!(matches!(parse(&longer), StateError::Length { .. }));
    let mut other = bytes.clone();
    other[16] = b'm';
    assert_eq!(parse(&other).to_string(), "it has section mACH where MACH belongs");
    let mut many = bytes;
    many[24] = 33;
    assert_eq!(parse(&many).to_string(), "it says cpus: 33, which no machine has");
}

#[test]
fn another_machine_is_refused_and_the_difference_said() {
    let saved = state().facts;
    let differs = |change: &dyn Fn(&mut Config), sizes: &[u64]| {
        let mut asked = config();
        change(&mut asked);
        saved.check(&Facts::of(&asked, sizes)).unwrap_err().to_string()
    };
    assert!(saved.check(&Facts::of(&config(), &[4096, 8192])).is_ok());
    let sizes = [4096, 8192];
    assert_eq!(differs(&|asked| asked.vcpus = 4, &sizes), "it was saved with cpus 2, and asked for is 4");
    assert!(differs(&|asked| asked.memory = 1 << 30, &sizes).contains("memory of 67108864"));
    assert!(differs(&|asked| drop(asked.disks.pop()), &sizes).contains("disks: 2"));
    assert!(differs(&|_| {}, &[4096, 4096]).contains("disk 1 of bytes 8192"));
    assert!(differs(&|asked| asked.disks[0].queues = 1, &sizes).contains("queues of disk 0: 3"));
    assert!(differs(&|asked| asked.disks[1].read_only = false, &sizes).contains("disk 1 read-only: true"));
    assert!(differs(&|asked| asked.console = false, &sizes).contains("console: true"));
    assert!(differs(&|asked| asked.net = None, &sizes).contains("hardware address"));
}

proptest! {
    #[test]
    fn whatever_is_changed_is_refused_or_read_as_it_stands(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = state().to_bytes();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(read) = MachineState::from_bytes(&bytes) {
            let again = read.to_bytes();
            // But for the address of an interface that there is not, every byte that is read counts.
            prop_assert_eq!(again.len(), bytes.len());
        }
    }

    #[test]
    fn any_bytes_have_an_end(body in prop::collection::vec(any::<u8>(), 0..4096)) {
        let mut bytes = b"BHKSTATE\x01\0\0\0".to_vec();
        bytes.extend(u32::try_from(body.len()).unwrap().to_le_bytes());
        bytes.extend(body);
        let _ = MachineState::from_bytes(&bytes);
    }
}
