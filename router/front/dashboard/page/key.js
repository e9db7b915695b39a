// The operator's key, where one is needed: in this tab's sessionStorage and nowhere else. No cookie, so that no other
// page's request ever brings it along.

const NAME = "headrace.key";

export const known = () => sessionStorage.getItem(NAME) !== null;
export const remember = (key) => sessionStorage.setItem(NAME, key);
export const forget = () => sessionStorage.removeItem(NAME);

export function headers() {
  return known() ? { authorization: `Bearer ${sessionStorage.getItem(NAME)}` } : {};
}
