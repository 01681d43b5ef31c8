//! Values that choose the device and the types on it.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{
    cli::common::{kernels, output::write_note},
    device::{AutoDevice, DType, Device, DeviceKind},
    model::BaseDType,
};

/// The value of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceName {
    /// CUDA if there is a device, else the CPU.
    Auto,
    /// The cores of the host.
    Cpu,
    /// The CUDA device with this number.
    Cuda(usize),
}

impl DeviceName {
    /// Opens the device.
    ///
    /// # Errors
    /// [`Error::Input`](crate::error::Error::Input) when there is no such device.
    pub fn open(self) -> crate::error::Result<Device> {
        match self {
            Self::Cpu => Ok(Device::HOST),
            Self::Cuda(number) => {
                kernels::take()?;
                Device::cuda(number)
            }
            Self::Auto => {
                kernels::take()?;
                Ok(auto_device())
            }
        }
    }

    /// The kind of the device, which need not be on this machine.
    pub fn kind(self) -> &'static DeviceKind {
        match self {
            Self::Cpu => DeviceKind::CPU,
            Self::Cuda(_) => DeviceKind::CUDA,
            Self::Auto => AutoDevice::find().device.kind(),
        }
    }
}

/// The device of `--device auto`. Where a device seems to be here and is not taken, a line on stderr says why.
fn auto_device() -> Device {
    let AutoDevice { device, refused } = AutoDevice::find();
    if let Some(why) = refused {
        write_note(&format!("hint: --device auto takes {}: {why}", device.kind().label));
    }
    device
}

impl FromStr for DeviceName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.strip_prefix("cuda:")?.parse().ok();
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => number(text).map(Self::Cuda).ok_or_else(|| "give auto, cpu, cuda or cuda:N".to_owned()),
        }
    }
}

impl TryFrom<String> for DeviceName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        match name {
            DeviceName::Auto => "auto".to_owned(),
            DeviceName::Cpu => "cpu".to_owned(),
            DeviceName::Cuda(0) => "cuda".to_owned(),
            DeviceName::Cuda(number) => format!("cuda:{number}"),
        }
    }
}

/// The value of `--precision`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit arithmetic over the FP16 base.
    F32,
    /// FP16 activations with a loss scale, on CUDA devices.
    F16,
    /// BF16 activations on CUDA devices. On a CPU BF16 products if it has fast ones, everything else in F32.
    Bf16,
}

impl Precision {
    /// The element type of activations.
    pub fn activations(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// The value of `--base-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BaseDtypeName {
    /// FP16 matrices, 16 bits a weight.
    F16,
    /// 8-bit matrices with an FP16 scale for each 32 weights of a row.
    Q8,
    /// 4-bit matrices of the linear layers: NF4 with double quantisation, as in QLoRA.
    Nf4,
}

impl BaseDtypeName {
    /// The type in which the base keeps its matrices.
    pub fn kept(self) -> BaseDType {
        match self {
            Self::F16 => BaseDType::F16,
            Self::Q8 => BaseDType::Q8,
            Self::Nf4 => BaseDType::Nf4,
        }
    }
}
