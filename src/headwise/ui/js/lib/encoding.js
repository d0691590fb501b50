// Numbers as the page stores them: base64 of float32, or of integers that are shares of a maximum.

/** @typedef {{ top: number, data: string }} Shares base64 of uint16: shares of the largest number, top */

/** @param {string} text base64 @returns {Uint8Array<ArrayBuffer>} */
export function bytes(text) {
  const characters = atob(text);
  const values = new Uint8Array(characters.length);
  for (let i = 0; i < characters.length; i++) values[i] = characters.charCodeAt(i); // fast also for megabytes
  return values;
}

/** @param {string} text base64 of float32 */
export function floats(text) {
  return new Float32Array(bytes(text).buffer);
}

/** Numbers stored as float32, or as shares of the largest. @param {string | Shares} stored */
export function numbers(stored) {
  if (typeof stored === "string") return floats(stored);
  return Float32Array.from(new Uint16Array(bytes(stored.data).buffer), (share) => (stored.top * share) / 65535);
}

/** The largest error of a weight stored in one byte: half a step to either side.
 * @param {number} byte @param {number} top */
export function rootError(byte, top) {
  return top * (((byte + 0.5) / 255) ** 2 - (byte / 255) ** 2);
}
