// Figures for people: three significant digits and a unit.

function scaled(value, unit, scales) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return `0 ${unit}`.trim();
  const [factor, prefix] = scales.find(([factor]) => Math.abs(value) >= factor) ?? scales.at(-1);
  const digits = value / factor;
  const text = Math.abs(digits) >= 100 ? Math.round(digits).toString() : Number(digits.toPrecision(3)).toString();
  return `${text} ${prefix}${unit}`.trim();
}

const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const SMALL = [[1, ""], [1e-3, "m"], [1e-6, "µ"]];

export const bandwidth = (value) => scaled(value, "B/s", LARGE);
export const bytes = (value) => scaled(value, "B", LARGE);
export const duration = (value) => scaled(value, "s", SMALL);
export const rate = (value) => scaled(value, "/s", [[1e6, "M"], [1e3, "k"], [1, ""]]);
export const percent = (value) => `${Math.round(100 * value)} %`;
