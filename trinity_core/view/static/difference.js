// Which words of a reference an answer has, in the same order: a longest common subsequence.
const MOST = 1000;

// [word, whether the answer has it] for each word of the reference. Of long texts the last words count.
export function difference(reference, answer) {
  const [a, b] = [reference, answer].map((text) => (text.match(/\S+/g) ?? []).slice(-MOST));
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width);  // of the words from i and from j on
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const [down, right] = [common[(i + 1) * width + j], common[i * width + j + 1]];
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(down, right);
    }
  }
  const found = [];
  for (let i = 0, j = 0; i < a.length;) {
    if (a[i] === b[j]) found.push([a[i++], true]), j++;
    else if (j >= b.length || common[(i + 1) * width + j] >= common[i * width + j + 1]) found.push([a[i++], false]);
    else j++;
  }
  return found;
}
