// Weights over the patches of an image.
import { weightRow } from "./matrix.js";

/** @import { Head, ImageGrid, Matrix, Run } from "./run.js" */

/** Whether a pass read an image. @param {Run} run */
export function hasImage(run) {
  return run.texts.some(({ image }) => image);
}

/** The image that a layer attends to. @param {Run} run @param {number} row @returns {ImageGrid | null} */
export function keyImage(run, row) {
  return run.text(row, "to").image ?? null;
}

/** The token whose weights are drawn: the chosen one; else the last of a text behind the image, a special token, or
 * the patch in the middle.
 * @param {Run} run @param {number} row @param {number | null} token */
export function queryToken(run, row, token) {
  const { pieces, image } = run.text(row, "from");
  if (token !== null && token < pieces.length) return token;
  if (!image) return 0;
  if (pieces.length > image.offset + image.rows * image.columns) return pieces.length - 1; // of the text behind it
  return image.offset ? 0 : patchToken(image, image.rows >> 1, image.columns >> 1);
}

/** The position of a patch among the tokens. @param {ImageGrid} image @param {number} row @param {number} column */
export function patchToken({ offset, columns }, row, column) {
  return offset + row * columns + column;
}

/** The row and column of a token, null for a token that is no patch.
 * @param {ImageGrid} image @param {number} token @returns {[number, number] | null} */
export function patchPlace({ offset, rows, columns }, token) {
  return token < offset || token >= offset + rows * columns
    ? null
    : [Math.floor((token - offset) / columns), (token - offset) % columns];
}

/** The weights of a head from a token to the patches, as far as the page knows them; null where it sees no image.
 * @param {Run} run @param {Head} at @param {number | null} token @returns {Matrix | null} */
export function patchWeights(run, at, token) {
  const image = keyImage(run, at[0]);
  if (!image) return null;
  const { rows, columns, offset } = image;
  const values = weightRow(run, at, "pieces", queryToken(run, at[0], token)).subarray(offset, offset + rows * columns);
  return { rows, columns, values, top: values.reduce((most, value) => Math.max(most, value), 0) };
}
