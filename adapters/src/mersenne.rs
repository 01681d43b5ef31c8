//! The random numbers of PyTorch's CPU generator: MT19937 (Matsumoto and Nishimura 1998), for tensors that files may leave
//! out because a key in the config gives them.

/// Words of the state.
const WORDS: usize = 624;
/// Distance of the words that a new one is made of.
const SHIFT: usize = 397;

/// A generator in the state after `torch.Generator().manual_seed(seed)`.
pub(crate) struct MersenneTwister {
    state: [u32; WORDS],
    /// Index of the next word in `state`; at the end of it all words are made anew.
    next: usize,
}

impl MersenneTwister {
    /// PyTorch takes the lower 32 bits of a seed.
    pub fn new(seed: u64) -> Self {
        let mut state = [seed as u32; WORDS];
        for index in 1..WORDS {
            let last = state[index - 1];
            state[index] = 1_812_433_253u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(index as u32);
        }
        Self { state, next: WORDS }
    }

    fn word(&mut self) -> u32 {
        if self.next == WORDS {
            self.renew();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn renew(&mut self) {
        for index in 0..WORDS {
            let y = (self.state[index] & 0x8000_0000) | (self.state[(index + 1) % WORDS] & 0x7fff_ffff);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[index] = self.state[(index + SHIFT) % WORDS] ^ (y >> 1) ^ odd;
        }
        self.next = 0;
    }

    /// The next number of `torch.empty(.., dtype=torch.float32).uniform_(from, to)`: 24 bits of a word, scaled in F64
    /// between bounds that are rounded to F32.
    pub fn uniform(&mut self, from: f64, to: f64) -> f32 {
        let (from, to) = (f64::from(from as f32), f64::from(to as f32));
        let part = f64::from(self.word() & 0x00ff_ffff) / f64::from(1u32 << 24);
        (part * (to - from) + from) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `torch.empty(6).uniform_(-1, 1, generator=torch.Generator().manual_seed(SEED))` of torch 2.15, and numbers 624 and
    /// 9999 of as many.
    #[test]
    fn numbers_are_pytorch_s() {
        for (seed, first, late) in [
            (0, [0xbbf55400, 0x3f09545e, 0xbf52b316, 0xbf3c6680], [0xbe91c318, 0x3f75dd00]),
            (7, [0x3d8f0af0, 0xbf1a3678, 0x3ea30864, 0x3ea0a7d8], [0xbd2c7520, 0xbf5d2d98]),
            (4294967303, [0x3d8f0af0, 0xbf1a3678, 0x3ea30864, 0x3ea0a7d8], [0xbd2c7520, 0xbf5d2d98]),
            (123456789012, [0xbf1ad6c6, 0xbf69c70c, 0x3e9bb994, 0x3f7e464a], [0xbdfc2980, 0x3c9e0f00]),
        ] {
            let mut numbers = MersenneTwister::new(seed);
            let drawn: Vec<u32> = (0..10_000).map(|_| numbers.uniform(-1.0, 1.0).to_bits()).collect();
            assert_eq!((&drawn[..4], [drawn[624], drawn[9999]]), (&first[..], late), "{seed}");
        }
    }
}
