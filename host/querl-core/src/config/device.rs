//! What the key `device` names.

/// Most ranks of one run: more cards than this no machine holds.
const MAX_RANKS: usize = 64;

/// Devices, as `device` names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSetting {
    /// The first card where there is one, else the processor.
    Auto,
    /// The processor, as so many ranks that share it. More than one is a check of what several cards do, not faster.
    Cpu {
        /// At least 1.
        n_ranks: usize,
    },
    /// Cards by their numbers, each once: a rank on each, in this order.
    Cards(Vec<usize>),
}

impl DeviceSetting {
    /// How many devices share the work.
    pub fn n_ranks(&self) -> usize {
        match self {
            Self::Auto => 1,
            Self::Cpu { n_ranks } => *n_ranks,
            Self::Cards(cards) => cards.len(),
        }
    }

    /// Of `auto`, `cpu`, `cpu:2`, `cuda:0`, `cuda:0,1,3` or `cuda:0-3`. `None` of everything else.
    pub fn from_name(name: &str) -> Option<Self> {
        match (name, name.strip_prefix("cpu:"), name.strip_prefix("cuda:")) {
            ("auto", ..) => Some(Self::Auto),
            ("cpu", ..) => Some(Self::Cpu { n_ranks: 1 }),
            (_, Some(n_ranks), _) => {
                let n_ranks = number(n_ranks).filter(|n| (1..=MAX_RANKS).contains(n))?;
                Some(Self::Cpu { n_ranks })
            }
            (.., Some(list)) => cards(list).map(Self::Cards),
            _ => None,
        }
    }
}

fn cards(list: &str) -> Option<Vec<usize>> {
    let mut cards = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last - first >= MAX_RANKS {
            return None;
        }
        cards.extend(first..=last);
    }
    let is_twice = |(index, card): (usize, &usize)| cards[..index].contains(card);
    (cards.len() <= MAX_RANKS && !cards.iter().enumerate().any(is_twice)).then_some(cards)
}

/// Digits alone: a sign or a space would be another spelling of the same number.
fn number(text: &str) -> Option<usize> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_several_cards_and_ranges_are_read() {
        let cards = |list: &[usize]| Some(DeviceSetting::Cards(list.to_vec()));
        assert_eq!(DeviceSetting::from_name("auto"), Some(DeviceSetting::Auto));
        assert_eq!(DeviceSetting::from_name("cpu"), Some(DeviceSetting::Cpu { n_ranks: 1 }));
        assert_eq!(DeviceSetting::from_name("cpu:3"), Some(DeviceSetting::Cpu { n_ranks: 3 }));
        assert_eq!(DeviceSetting::from_name("cuda:12"), cards(&[12]));
        assert_eq!(DeviceSetting::from_name("cuda:2,0"), cards(&[2, 0]));
        assert_eq!(DeviceSetting::from_name("cuda:0-3,5"), cards(&[0, 1, 2, 3, 5]));
    }

    #[test]
    fn other_spellings_and_a_card_that_comes_twice_are_none() {
        let names = ["", "gpu", "CPU", "cpu:", "cpu:0", "cpu:65", "cpu:-1", "cuda", "cuda:", "cuda:-1", "cuda:+1"];
        let lists = ["cuda: 1", "cuda:x", "cuda:1,", "cuda:1,1", "cuda:0-2,1", "cuda:3-1", "cuda:0-99", "cuda:0-"];
        for name in names.into_iter().chain(lists) {
            assert_eq!(DeviceSetting::from_name(name), None, "{name}");
        }
    }
}
