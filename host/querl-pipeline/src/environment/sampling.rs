//! Which episodes are judged: a share of them, the same ones whenever the same run is run.

use querl_core::fsx::digest_hex;

/// Which episodes are judged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Judging {
    /// Nobody judges.
    None,
    /// This share, chosen by a hash of the id.
    Share(f64),
}

impl Judging {
    /// True where the episode with this id is judged.
    pub fn samples(self, id: &str) -> bool {
        match self {
            Self::None => false,
            Self::Share(share) => position(id) < share,
        }
    }
}

/// Where `id` falls in 0 to 1: evenly over ids, the same on every machine.
fn position(id: &str) -> f64 {
    let digest = digest_hex(id.as_bytes());
    let leading = u32::from_str_radix(&digest[..8], 16).expect("a digest is hexadecimal");
    f64::from(leading) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_episodes_is_judged_and_always_the_same() {
        let sampled = |share| (0..2000).filter(|n| Judging::Share(share).samples(&format!("step-1/{n}/0"))).count();
        assert_eq!(sampled(0.3), sampled(0.3));
        assert!((540..660).contains(&sampled(0.3)), "{}", sampled(0.3));
        assert_eq!((sampled(0.0), sampled(1.0)), (0, 2000));
    }
}
